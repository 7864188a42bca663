"""Memory that is full: the client is named, a command ends with one line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from encrypted_runs import small, small_grid, train
from flwr.app import Message

from bract.cli.main import main
from bract.client.training import train_locally
from bract.errors import RunFailedError

FULL = {
    "Python": MemoryError(),
    "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 B"),
    "a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}


@pytest.mark.parametrize("whose", FULL)
def test_a_client_without_memory_is_named_and_the_others_go_on(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    asked: list[int] = []

    def full(message: Message) -> None:
        asked.append(message.metadata.dst_node_id)

    def train_or_not(*given: object, **named: object) -> object:
        if asked[-1] == 2:
            raise FULL[whose]
        return train_locally(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("bract.client.app.train_locally", train_or_not)
    for tolerate in (True, False):
        config = small(strategy={"tolerate_failures": tolerate})
        folder = tmp_path / str(tolerate)
        grid = small_grid(folder, config, faults=full)
        if not tolerate:
            with pytest.raises(RunFailedError, match="round 1: client-1: out of memory"):
                train(folder, config, grid)
            continue
        row = train(folder, config, grid).metrics()[1]
        assert set(row.clients) == {"client-0", "client-2"}
        (failure,) = row.failures
        assert failure.client == "client-1"
        assert failure.reason.startswith("out of memory (")
        assert "lower training.batch_size" in failure.reason


@pytest.mark.parametrize("whose", FULL)
def test_a_command_without_memory_ends_with_one_line_and_code_1(
    whose: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> None:
        raise FULL[whose]

    monkeypatch.setattr("bract.cli.main.app", full)
    monkeypatch.setattr("bract.cli.main.listen", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bract", "audit", "runs/x"])
    with pytest.raises(SystemExit) as left:
        main()
    (said,) = capfd.readouterr().err.splitlines()
    assert left.value.code == 1
    assert said.startswith("error: out of memory (")
