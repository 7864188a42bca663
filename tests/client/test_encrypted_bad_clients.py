"""Encrypted runs with one bad client: it loses its own contribution, and the others finish."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encrypted_runs import TamperingGrid, final_model, small, small_grid, train
from flwr.app import Array
from numpy.lib.format import write_array_header_1_0
from refusals import refused

from bract.paillier.cipher import from_matrix, to_matrix
from bract.paillier.threshold import PartialDecryption
from bract.protocol.ciphertexts import EncryptedUpdate, check_plan

PAILLIER = {"scheme": "paillier", "clip": 0.5}
BAD = 3
"""Node of the bad client, which calls itself client-2."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def run(folder: Any, keys: Any, tamper: Any, rounds: Any = 1, **encryption: Any) -> Any:
    config = small(
        encryption={**PAILLIER, **encryption}, rounds=rounds, strategy={"tolerate_failures": True}
    )
    grid = small_grid(folder, config, keys, kind=TamperingGrid, tamper=tamper)
    return train(folder, config, grid), grid


def array(data: Any, shape: Any = (1, 512)) -> Any:
    return Array(dtype="uint8", shape=shape, stype="numpy.ndarray", data=data)


def huge() -> Any:
    stream = io.BytesIO()
    write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (10**13,)})
    return stream.getvalue()


def text(data: Any) -> Any:
    return Array(np.frombuffer(data, dtype=np.uint8))


def header(record: Any, **changes: Any) -> Any:
    fields = json.loads(record["header"].numpy().tobytes())
    fields["parameters"]["vector"].update(changes)
    return text(json.dumps(fields).encode())


REPLIES = [
    lambda record: record.update(parameters=array(b"PK\x03\x04" + bytes(60))),
    lambda record: record.update(parameters=array(huge())),
    lambda record: record.update(header=text(b"[" * 100_000)),
    lambda record: record.update(header=text(b'{"parameters": ' + b"9" * 5000 + b"}")),
    lambda record: record.update(header=text(b"{}")),
    lambda record: record.update(header=header(record, randomness="standard")),
    lambda record: record.update(header=header(record, weight=True)),
    lambda record: record.update(header=header(record, layout={"length": 10**12, "clip": 1})),
    lambda record: record.update(header=header(record, layout={"length": "many"})),
    lambda record: record.update(header=header(record, layout=[1])),
    lambda record: record.pop("parameters"),
]


@pytest.mark.parametrize("shapes", [(("w", (3,)), ("w", (3,))), (("w", (-2,)), ("w", (3,)))])
def test_a_tensor_that_is_named_twice_is_refused(shapes: Any) -> None:
    update = EncryptedUpdate({}, {"parameters": shapes})
    with refused("update-refused", "w"):
        check_plan(update, small(encryption="paillier").encryption, {"w": torch.zeros(3)})


def test_every_garbage_update_costs_its_client_one_contribution(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def tamper(message: Any, reply: Any) -> None:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == BAD:
            change = REPLIES[message.content["config"]["server-round"] - 1]
            change(reply.content.array_records["ciphertexts"])

    done, _ = run(tmp_path, [whole_key] * 3, tamper, rounds=len(REPLIES))
    rows = done.metrics()[1:]
    assert len(rows) == len(REPLIES)
    for row in rows:
        assert set(row.clients) == {"client-0", "client-1"}
        (failure,) = row.failures
        assert failure.client == "client-2"
        assert "\n" not in failure.reason
        assert len(failure.reason) < 1001
    reasons = "\n".join(row.failures[0].reason for row in rows)
    assert "standard randomness, this run's is djn" in reasons
    assert caplog.text.count("client-2 failed: ") == len(REPLIES)
    models = [final_model(tmp_path, client) for client in range(3)]
    assert all(bool((models[0][n] == models[2][n]).all()) for n in models[0])


def test_a_helper_that_alters_its_partial_decryption_is_refused_by_name(
    tmp_path: Path,
    two_of_three: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It multiplies one power by 1 + n and seals that: the others' mean would move unseen."""
    import bract.client.encrypted.sharing

    sharing: Any = bract.client.encrypted.sharing

    honest = sharing.partial_decrypt

    def altered(share: Any, vector: Any, *arguments: Any, **options: Any) -> Any:
        partial = honest(share, vector, *arguments, **options)
        if share.index == 1:
            numbers = from_matrix(partial.data)
            n = share.public.n
            numbers[0] = numbers[0] * (1 + n) % n**2
            data = to_matrix(numbers, partial.data.shape[1])
            return PartialDecryption.from_header(partial.header(), data)
        return partial

    monkeypatch.setattr(sharing, "partial_decrypt", altered)
    done, _ = run(tmp_path, two_of_three, lambda message, reply: None, rounds=2, threshold=2)
    assert "client-1 refused the partial decryptions of client-0" in caplog.text
    assert "client-2 refused the partial decryptions of client-0" in caplog.text
    assert [len(row.clients) for row in done.metrics()] == [0, 3, 3]
    models = [final_model(tmp_path, client) for client in range(3)]
    assert all(bool((models[1][n] == models[2][n]).all()) for n in models[1])
    assert max(float(v.abs().max()) for v in models[1].values()) < 5


@pytest.mark.thorough
def test_wrong_powers_cost_the_server_time_once_and_their_client_its_updates_after(
    tmp_path: Path, two_of_three: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Powers of another encryption: the first sum is stripped by the server, then it refuses."""
    kept: list[Any] = []

    def tamper(message: Any, reply: Any) -> None:
        if message.metadata.message_type != "train" or message.metadata.dst_node_id != BAD:
            return
        powers = reply.content.array_records["powers"]
        kept.append(powers["parameters"])
        powers["parameters"] = Array(powers["parameters"].numpy()[::-1].copy())

    done, _ = run(tmp_path, two_of_three, tamper, rounds=2, threshold=2)
    assert "client-2: parameters: the powers are not the n-th powers" in caplog.text
    first, second = done.metrics()[1:]
    assert set(first.clients) == {"client-0", "client-1", "client-2"}
    assert set(second.clients) == {"client-0", "client-1"}
    assert "for the second time" in second.failures[0].reason
    models = [final_model(tmp_path, client) for client in range(3)]
    assert all(bool((models[0][n] == models[2][n]).all()) for n in models[0])
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.update(parameters=Array(p["parameters"].numpy()[:-1])), "expected powers as"),
        (lambda p: p.update(parameters=array(bytes(8))), "cannot be decoded"),
        (lambda p: p.update(other=p.pop("parameters")), "sent powers of other"),
    ],
)
def test_powers_that_cannot_be_any_cost_their_client_its_update(
    tmp_path: Path, two_of_three: Any, damage: Any, message: str
) -> None:
    def tamper(asked: Any, reply: Any) -> None:
        if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == BAD:
            damage(reply.content.array_records["powers"])

    done, _ = run(tmp_path, two_of_three, tamper, threshold=2)
    (failure,) = done.metrics()[1].failures
    assert failure.client == "client-2"
    assert message in failure.reason


def test_a_helper_whose_boxes_are_incomplete_is_left_out(
    tmp_path: Path, two_of_three: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def tamper(message: Any, reply: Any) -> None:
        if message.metadata.message_type == "query.partial" and message.metadata.dst_node_id == 1:
            keys = reply.content.config_records["partial-keys"]
            keys["nodes"], keys["boxes"] = keys["nodes"][:1], keys["boxes"][:1]

    run(tmp_path, two_of_three, tamper, threshold=2)
    assert "client-0 did not help to decrypt: sealed nothing for 2 of 3 clients" in caplog.text
    assert final_model(tmp_path, 2)
