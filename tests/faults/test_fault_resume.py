"""What a run left that was killed between two writes, and what --resume makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from refusals import refused

from bract.client.app import app
from bract.config import build_config, dump_config
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid

CONFIG = build_config(
    {
        "name": "killed",
        "clients": 1,
        "rounds": 2,
        "data": {"image_size": 16, "validation": 0.0},
        "model": {"name": "lenet-strided", "activation": "relu"},
        "training": {"local_steps": 1},
        "capture": {"enabled": False},
    }
)


class Killed(BaseException):
    """Stands for SIGKILL."""


def train(run: RunDirectory, trained: list[int] | None = None) -> None:
    def note(message: Message) -> None:
        if message.metadata.message_type == "train" and trained is not None:
            trained.append(int(str(message.content.config_records["config"]["server-round"])))

    grid = LoopbackGrid(
        app, [{"partition-id": 0}], {"federation": dump_config(CONFIG)}, faults=note
    )
    Federation(CONFIG, run).train(grid)


def kill_at(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, number: int, *, row: bool) -> None:
    """Train until the row of round ``number``, and end before or right after it is written."""
    append = RunDirectory.append_metrics

    def until(self: RunDirectory, found: Any) -> None:
        if found.round < number or row:
            append(self, found)
        if found.round == number:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "append_metrics", until)
        with pytest.raises(Killed):
            train(run)


@pytest.mark.parametrize("row", [True, False], ids=["after the row", "before the row"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_run_is_resumed_without_a_round_twice(
    number: int, row: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.create(CONFIG)
    kill_at(monkeypatch, run, number, row=row)
    trained: list[int] = []
    train(run, trained)
    assert [found.round for found in run.metrics()] == [0, 1, 2]
    # The model of a round that lacks its row has seen the round: no client trains it again.
    assert trained == ([2] if number else [1, 2])
    assert all(found.evaluation is not None for found in run.metrics())
    assert (run.models / "final.safetensors").is_file()


def test_a_model_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.create(CONFIG)
    kill_at(monkeypatch, run, 1, row=True)
    (run.models / "last.safetensors").unlink()
    with refused("file-damaged", "last.safetensors", 1):
        train(run)
