"""What clients of encrypted aggregation send through the server has the size that it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from refusals import refused

from bract.masks import party
from bract.paillier import exchange
from bract.protocol import keyexchange, masking

LARGE = bytes(20_000_000)
HASH, BOX = bytes(32), bytes(152)


def dealt(**changes: bytes) -> RecordDict:
    found = {"seed": HASH, "box": BOX, "own": HASH, "pairs": HASH} | changes
    parcel = party.Parcel(found["box"], found["own"], found["pairs"])
    own = party.Parcel(b"", HASH, HASH)
    return masking.write_dealt(party.Dealt(found["seed"], {1: own, 2: parcel}))


def test_shares_of_the_size_of_shares_are_read() -> None:
    shares = party.Shares(bytes(party.SHARE_BYTES), bytes(party.SHARE_BYTES)).to_bytes()
    sender, recipient = exchange.make_identity(), exchange.make_identity()
    context = exchange.Context("run", "1", "2")
    box = exchange.seal(shares, recipient.public, context, sender=sender)
    assert masking.read_dealt(dealt(box=box)).parcels[2].box == box


@pytest.mark.parametrize("field", ["seed", "box", "own", "pairs"])
@pytest.mark.parametrize("size", [20_000_000, 31, 33])
def test_shares_of_another_size_are_refused(field: str, size: int) -> None:
    with refused("message-malformed", size, 152 if field == "box" else 32):
        masking.read_dealt(dealt(**{field: bytes(size)}))


def test_values_by_node_have_their_size() -> None:
    def read(value: bytes) -> dict[int, bytes]:
        return masking.read_by_node(masking.write_by_node({1: value}), "shares", 52)

    assert read(bytes(52)) == {1: bytes(52)}
    with refused("message-malformed", len(LARGE), 52):
        read(LARGE)


def test_a_reason_is_short() -> None:
    sent = masking.write_refused({1: "\N{GRINNING FACE}" * 10_000})
    assert 0 < len(masking.read_refused(sent)[1]) <= 200
    with refused("message-malformed", len(LARGE), 800):
        masking.read_refused(masking.write_by_node({1: LARGE}))


@pytest.mark.parametrize("field", ["key", "boxes"])
def test_a_key_and_its_boxes_have_a_largest_size(field: str) -> None:
    content = keyexchange.write_dealt(b"key", {1: b"box"})
    message: Any = SimpleNamespace(content=content)
    assert keyexchange.read_dealt(message) == (b"key", {1: b"box"})
    content.config_records["dealt"][field] = LARGE if field == "key" else [LARGE]
    with refused("message-malformed", len(LARGE)):
        keyexchange.read_dealt(message)


def test_a_key_box_on_its_way_has_a_largest_size() -> None:
    identity = exchange.make_identity()
    box: ConfigRecord = keyexchange.write_key_box(1, identity.public, LARGE)
    with refused("message-malformed", len(LARGE)):
        content = RecordDict({keyexchange.KEY_BOX: box})
        keyexchange.open_key_box(content, identity, session="run", recipient=2)
