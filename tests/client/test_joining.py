"""Clients that join in a later round, under the real server and client code, without processes."""

from pathlib import Path

import pytest
from flwr.app import Message
from refusals import refused

import bract.client.app as client_app
from bract import ObservationStore
from bract.config import build_config, dump_config
from bract.protocol.records import write_absence
from bract.rundir import RunDirectory
from bract.schema.capture import MISSED
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def federated(
    folder: Path, joins: dict[str, int], policy: str = ""
) -> tuple[RunDirectory, LoopbackGrid]:
    config = build_config(
        {
            "clients": 2,
            "rounds": 3,
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 1},
            "strategy": {"joins": joins},
        }
    )
    run = RunDirectory(folder / "run")
    run.create(config)
    (folder / "policy.yaml").write_text(policy)
    nodes: list[dict[str, bool | float | int | str]] = [
        {
            "partition-id": number,
            "num-partitions": 2,
            "policy": str(folder / "policy.yaml"),
            "state-dir": str(folder / "state"),
        }
        for number in range(2)
    ]
    grid = LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
    Federation(config, run).train(grid)
    return run, grid


def test_a_client_sends_nothing_before_the_round_in_which_it_joins(tmp_path: Path) -> None:
    run, _ = federated(tmp_path, {"client-1": 3})
    rows = {row.round: row for row in run.metrics()}
    assert [set(rows[n].clients) for n in (1, 2, 3)] == [
        {"client-0"},
        {"client-0"},
        {"client-0", "client-1"},
    ]
    assert not any(row.failures for row in rows.values())
    captured = {(seen.round, seen.client) for seen in ObservationStore(run.captures)}
    assert captured == {(1, "client-0"), (2, "client-0"), (3, "client-0"), (3, "client-1")}
    assert not (run.captures / MISSED).exists()


def test_who_stays_away_without_being_named_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = LoopbackGrid._answer

    def away(self: LoopbackGrid, message: Message) -> Message:
        if message.metadata.dst_node_id == 2:
            return Message(write_absence("client-1", 9), reply_to=message)
        return answer(self, message)

    monkeypatch.setattr(LoopbackGrid, "_answer", away)
    with refused("run-failed", "client-1"):
        federated(tmp_path, {})


def test_a_site_that_checks_the_start_checks_it_before_it_joins(tmp_path: Path) -> None:
    run, _ = federated(tmp_path, {"client-1": 3}, "initial_model: from-seed")
    assert [sorted(row.clients) for row in run.metrics()[2:]] == [
        ["client-0"],
        ["client-0", "client-1"],
    ]
