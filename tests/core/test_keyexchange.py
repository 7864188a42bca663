import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, RecordDict
from refusals import refused

from bract.config.encryption import EncryptionConfig
from bract.errors import BractError
from bract.paillier import combine, partial_decrypt
from bract.paillier.exchange import make_identity
from bract.protocol.ciphertexts import encrypt_update
from bract.protocol.keyexchange import (
    KEY_BOX,
    box_keys,
    open_key_box,
    write_key_box,
)
from bract.protocol.partials import (
    RefusedHelpError,
    SealedPartials,
    open_bundle,
    seal_partials,
    write_bundle,
)

CONFIG = EncryptionConfig(scheme="paillier", threshold=2)


SENDER = make_identity()


def boxed(identities: Any, session: Any = "run") -> Any:
    publics = {node: identity.public for node, identity in identities.items()}
    keys = {n: b"secret %d" % n for n in publics}
    return box_keys(keys, publics, session=session, sender=1, identity=SENDER)


def test_a_key_box_opens_for_its_recipient_in_its_run_only() -> None:
    identities = {2: make_identity(), 3: make_identity()}
    boxes = boxed(identities)
    assert not any(b"secret" in box for box in boxes.values())
    content = RecordDict({KEY_BOX: write_key_box(1, SENDER.public, boxes[2])})
    assert open_key_box(content, identities[2], session="run", recipient=2) == b"secret 2"
    ours = SENDER.public
    for identity, session, recipient, sender, public in (
        (identities[3], "run", 2, 1, ours),
        (identities[2], "other", 2, 1, ours),
        (identities[2], "run", 3, 1, ours),
        (identities[2], "run", 2, 4, ours),
        (identities[2], "run", 2, 1, make_identity().public),
    ):
        content = RecordDict({KEY_BOX: write_key_box(sender, public, boxes[2])})
        with pytest.raises(BractError):
            open_key_box(content, identity, session=session, recipient=recipient)


def helped(shares: Any, identities: Any) -> Any:
    values = torch.linspace(-1, 1, 9)
    update, _ = encrypt_update(shares[0].public, {"w": values}, {}, CONFIG)
    vector = update.vectors["parameters"]
    publics = {node: identity.public for node, identity in identities.items()}
    bundle = [
        seal_partials(
            {"0.parameters": partial_decrypt(share, vector)},
            publics,
            session="run",
            sender=share.index,
            identity=SENDER,
            tag="round-4",
        )
        for share in shares[:2]
    ]
    return vector, values, bundle


def test_partial_decryptions_reach_the_recipients_and_nobody_else(two_of_three: Any) -> None:
    identities = {1: make_identity(), 7: make_identity()}
    vector, values, bundle = helped(two_of_three, identities)
    for node, identity in identities.items():
        content = write_bundle("round-4", bundle, node)
        found = open_bundle(content, "round-4", identity, session="run", recipient=node)
        assert {helper.identity for helper in found} == {SENDER.public}
        opened = [helper.partials["0.parameters"] for helper in found]
        partials = [dataclasses.replace(p, data=p.data.reshape(vector.data.shape)) for p in opened]
        mean = combine(two_of_three[2], vector, partials)
        np.testing.assert_allclose(mean, values.numpy(), atol=2e-5)
        raw = partials[0].data.tobytes()[:64]
        sent = [a.numpy().tobytes() for r in content.array_records.values() for a in r.values()]
        assert not any(raw in data for data in sent)
    with pytest.raises(BractError):
        open_bundle(content, "round-4", make_identity(), session="run", recipient=7)
    with refused("message-malformed", "round-5"):
        open_bundle(content, "round-5", identities[7], session="run", recipient=7)


def test_a_partial_decryption_altered_on_its_way_is_refused_and_its_helper_named(
    two_of_three: Any,
) -> None:
    identities = {1: make_identity()}
    _, _, bundle = helped(two_of_three, identities)
    data = bundle[0].payload["0.parameters"]
    flipped = bytes([data[0] ^ 1]) + data[1:]
    bad = dataclasses.replace(bundle[0], payload={"0.parameters": flipped})
    deep = dataclasses.replace(bundle[1], headers={"0.parameters": "[" * 9000})
    content = write_bundle("round-4", [bad, deep], 1)
    with refused("decryption-refused", 1, 2, kind=RefusedHelpError) as caught:
        open_bundle(content, "round-4", identities[1], session="run", recipient=1)
    assert isinstance(caught.value, RefusedHelpError)
    assert caught.value.nodes == (1, 2)


def damaged(content: Any, change: Any) -> Any:
    change(content.config_records["partial-keys"], content.array_records["partials"])
    return SimpleNamespace(content=content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda keys, payload: keys.update(nodes=["1"], boxes=keys["boxes"][:1]),
            ("message-malformed", "1", "2"),
        ),
        (lambda keys, payload: keys.update(boxes=[]), ("message-malformed",)),
        (lambda keys, payload: keys.update(nodes=["one", "7"]), ("message-malformed",)),
        (
            lambda keys, payload: keys.update(boxes=[keys["boxes"][0], bytes(10**6)]),
            ("message-malformed", 80, 10**6),
        ),
        (
            lambda keys, payload: keys.update(names=["7.parameters"]),
            ("message-malformed", "0.parameters"),
        ),
        (lambda keys, payload: keys.update(headers=["0" * 20_000]), ("message-malformed",)),
        (
            lambda keys, payload: payload.update({"0.parameters": pickled()}),
            ("message-malformed", "0.parameters"),
        ),
        (
            lambda keys, payload: payload.update({"0.parameters": Array(SHORT)}),
            ("message-malformed", "0.parameters"),
        ),
    ],
)
def test_an_incomplete_answer_of_a_helper_is_refused(
    two_of_three: Any, change: Any, message: tuple[str, ...]
) -> None:
    identities = {1: make_identity(), 7: make_identity()}
    vector, _, bundle = helped(two_of_three, identities)
    sizes = {"0.parameters": vector.data.nbytes}

    def read(content: Any) -> Any:
        return SealedPartials.read(content, 5, SENDER.public, sizes=sizes, recipients=identities)

    read(SimpleNamespace(content=bundle[0].to_content()))
    with refused(*message):
        read(damaged(bundle[0].to_content(), change))


SHORT: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(10, dtype=np.uint8)


def pickled() -> Any:
    return Array(dtype="uint8", shape=(3,), stype="numpy.ndarray", data=b"PK\x03\x04")
