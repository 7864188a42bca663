"""Tensors travel as one array a dtype to who reads that, and everything stays as it was."""

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from safetensors.torch import load_file

import bract.client.app as client_app
from bract import ObservationStore
from bract.config import build_config, dump_config
from bract.protocol import arrays
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


class Listening(LoopbackGrid):
    """Keeps what the clients answered to train messages."""

    def _answer(self, message: Any) -> Any:
        reply = super()._answer(message)
        if message.metadata.message_type == "train":
            # The strategy lets go of a reply's arrays once they are in the sum.
            kept = Message(reply.content, reply_to=message)
            self.replies = [*getattr(self, "replies", []), kept]
        return reply


def federate(folder: Path, strategy: str) -> tuple[RunDirectory, Listening]:
    config = build_config(
        {
            **{"clients": 2, "rounds": 2, "seed": 3, "strategy": {"name": strategy}},
            "data": {"image_size": 16, "validation": 0.2},
            "model": {"name": "lenet-strided-bn", "activation": "relu"},
            "training": {"lr": 0.1, "local_steps": 2},
        }
    )
    run = RunDirectory(folder)
    run.create(config)
    nodes = [{"partition-id": i} for i in range(2)]
    grid = Listening(client_app.app, nodes, {"federation": dump_config(config)})
    Federation(config, run).train(grid)
    return run, grid


def records(messages: Any, name: str) -> list[bool]:
    """Tell of each record of this name whether it is packed."""
    found = [m.content.array_records.get(name) for m in messages if m.has_content()]
    return [arrays.PACKED in record for record in found if record is not None]


@pytest.mark.parametrize("strategy", ["fedavg", "fedboosting"])
def test_a_federation_of_packed_messages_is_the_same_to_the_last_bit(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, grid = federate(tmp_path / "packed", strategy)
    # Whoever has not answered yet may be anybody's ClientApp and is sent an array a tensor.
    assert records(grid.log, "arrays") == [False, False, True, True]
    assert records(grid.replies, "update") == [True] * 4
    assert records(grid.replies, "buffers") == [True] * 4
    if strategy == "fedboosting":
        assert records(grid.log, "fused-1") == [True] * 4
    monkeypatch.setattr(arrays, "FEWEST_PACKED", 10**6)
    plain, grid = federate(tmp_path / "plain", strategy)
    assert not any(records(grid.replies, "update"))
    assert not any(records(grid.log, "arrays"))
    wanted = load_file(plain.models / "final.safetensors")
    found = load_file(packed.models / "final.safetensors")
    assert list(found) == list(wanted)
    assert all(bool((found[n] == wanted[n]).all()) for n in wanted)
    pairs = zip(ObservationStore(packed.captures), ObservationStore(plain.captures), strict=True)
    for one, other in pairs:
        assert one.key == other.key
        for group in ("parameters", "buffers", "update", "returned_buffers"):
            held, expected = getattr(one, group), getattr(other, group)
            assert list(held) == list(expected)
            assert all(bool((held[n] == expected[n]).all()) for n in expected)


def test_an_update_is_not_packed_for_a_server_that_did_not_say_that_it_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bract.strategies import fedavg

    monkeypatch.setattr(fedavg, "PACKING_KEY", "nothing")
    _, grid = federate(tmp_path, "fedavg")
    assert not any(records(grid.replies, "update"))
    assert not any(records(grid.log, "arrays"))
