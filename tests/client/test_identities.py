"""A client that announces another one's keys or seat: it is out, under its own name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from encrypted_runs import TamperingGrid, key_files, small, train
from flwr.app import ConfigRecord, Message
from refusals import check_named, refused

from bract.client import app as client_app
from bract.config import dump_config
from bract.errors import RunFailedError
from bract.paillier import deal, exchange, keyfile

CLIENTS = 4
ATTACKER, VICTIM = 1, 4
"""Node ids: the attacker is read first."""


@pytest.fixture(scope="module")
def shares_of_four() -> Any:
    """Shares of a key that two of four clients use."""
    return deal(2, CLIENTS, 2048)


Tamper = Callable[[ConfigRecord, list[bytes]], None]


def run_with(
    folder: Path,
    kind: str,
    record: str,
    tamper: Tamper,
    keys: list[Any],
    *,
    listed: bool = True,
    unpinned: bool = False,
    **encryption: Any,
) -> Any:
    """Two rounds of clients that pin each other; one changes an answer, or is not pinned."""
    identities = [exchange.make_identity() for _ in range(CLIENTS)]
    public = [identity.public for identity in identities]
    names = [key.hex() for key in public]
    peers = folder / "peers"
    peers.write_text("\n".join(names))
    if unpinned:
        identities[VICTIM - 1] = exchange.make_identity()
    config = small(
        clients=CLIENTS,
        rounds=2,
        encryption={"clip": 0.5, "identities": names if listed else [], **encryption},
        strategy={"tolerate_failures": True},
        data={
            "image_size": 8,
            "validation": 0.0,
            "partition": {"kind": "sizes", "sizes": [20] * CLIENTS},
        },
    )
    files = key_files(folder / "keys", keys) if keys else []
    nodes = []
    for client, identity in enumerate(identities):
        file = folder / f"identity-{client}.pem"
        keyfile.save_identity(identity, file)
        node: dict[str, Any] = {
            "partition-id": client,
            "models": "encrypted_runs:tiny",
            "identity-key": str(file),
            "peers": str(peers),
            "state-dir": str(folder / f"state-{client}"),
            "public-test": True,
        }
        nodes.append(node | ({"paillier-key": str(files[client])} if files else {}))

    def changed(message: Message, reply: Message) -> None:
        metadata = message.metadata
        if metadata.message_type == kind and metadata.dst_node_id == ATTACKER:
            tamper(reply.content.config_records[record], public)

    grid = TamperingGrid(client_app.app, nodes, {"federation": dump_config(config)}, tamper=changed)
    return train(folder, config, grid).metrics()[-1], public


def test_a_masked_sum_keeps_the_client_whose_identity_another_announces(tmp_path: Path) -> None:
    def copied(record: ConfigRecord, public: list[bytes]) -> None:
        record["identity"] = public[VICTIM - 1]

    row, public = run_with(
        tmp_path, "query.advertise", "masks", copied, [], scheme="masks", threshold=3
    )
    (failure,) = row.failures
    assert len(row.clients) == CLIENTS - 1
    assert "client-3" in row.clients
    check_named(failure.reason, public[VICTIM - 1].hex())


@pytest.mark.parametrize("key", ["box-key", "mask-key"])
def test_a_masked_sum_keeps_the_client_whose_identity_another_takes_as_its_round_key(
    tmp_path: Path, key: str
) -> None:
    def copied(record: ConfigRecord, public: list[bytes]) -> None:
        record[key] = public[VICTIM - 1]

    row, public = run_with(
        tmp_path, "query.advertise", "masks", copied, [], scheme="masks", threshold=3
    )
    (failure,) = row.failures
    assert "client-3" in row.clients
    check_named(failure.reason, public[ATTACKER - 1].hex())


def test_an_encrypted_run_keeps_the_client_whose_identity_another_announces(
    tmp_path: Path, whole_key: Any
) -> None:
    def copied(record: ConfigRecord, public: list[bytes]) -> None:
        record["identity"] = public[VICTIM - 1]

    keys = [whole_key] * CLIENTS
    row, _ = run_with(tmp_path, "query.hello", "hello", copied, keys, scheme="paillier")
    (failure,) = row.failures
    assert "client-3" in row.clients
    assert len(row.clients) == CLIENTS - 1
    assert failure.client == "node-1"


def test_an_encrypted_run_keeps_the_client_whose_partition_another_claims(
    tmp_path: Path, whole_key: Any
) -> None:
    def claimed(record: ConfigRecord, public: list[bytes]) -> None:
        record["partition"] = VICTIM - 1

    keys = [whole_key] * CLIENTS
    row, _ = run_with(tmp_path, "query.hello", "hello", claimed, keys, scheme="paillier")
    (failure,) = row.failures
    assert sorted(row.clients) == ["client-1", "client-2", "client-3"]
    assert failure.client == "client-0"


def untouched(record: ConfigRecord, public: list[bytes]) -> None:
    """Change nothing."""


SHARES = {"scheme": "paillier", "threshold": 2}
SUMS = {"scheme": "masks", "threshold": 3}


@pytest.mark.parametrize("encryption", [SHARES, SUMS], ids=["threshold", "masks"])
def test_an_identity_that_no_site_pins_is_named_as_the_cause_where_none_are_listed(
    tmp_path: Path, shares_of_four: Any, encryption: dict[str, Any]
) -> None:
    keys = shares_of_four if encryption is SHARES else []
    with refused("clients-missing", "client-3", "encryption.identities", kind=RunFailedError):
        run_with(tmp_path, "", "", untouched, keys, listed=False, unpinned=True, **encryption)


@pytest.mark.parametrize("encryption", [SHARES, SUMS], ids=["threshold", "masks"])
def test_an_identity_that_is_not_listed_is_left_out_and_the_others_go_on(
    tmp_path: Path, shares_of_four: Any, encryption: dict[str, Any]
) -> None:
    keys = shares_of_four if encryption is SHARES else []
    row, _ = run_with(tmp_path, "", "", untouched, keys, unpinned=True, **encryption)
    assert sorted(row.clients) == ["client-0", "client-1", "client-2"]
    assert len(row.failures) == 1
