"""Memory that is full: the client is named, a command ends with one line.

For a client of a real federation see test_fault_returns.py.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import pytest
import torch
from breaking import measured, python_path
from encrypted_runs import small, small_grid, train
from flwr.app import Message
from refusals import refused
from test_processes import Command

from bract.cli.main import main
from bract.client.training import train_locally
from bract.rundir import RunDirectory
from bract.schema import AuditResult

FULL = {
    "Python": MemoryError(),
    "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 B"),
    "a library": ImportError("_csr.so: failed to map segment from shared object"),
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

    monkeypatch.setattr("bract.client.session.train_locally", train_or_not)
    for tolerate in (True, False):
        config = small(strategy={"tolerate_failures": tolerate})
        folder = tmp_path / str(tolerate)
        grid = small_grid(folder, config, faults=full)
        if not tolerate:
            with refused("run-failed", 1, "client-1"):
                train(folder, config, grid)
            continue
        row = train(folder, config, grid).metrics()[1]
        assert set(row.clients) == {"client-0", "client-2"}
        (failure,) = row.failures
        assert failure.client == "client-1"
        assert failure.reason.startswith("out of memory;")
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


LIMITED = """
import resource, sys
import psutil, torch
import bract.attacks.solve.engine as engine
from bract.cli.main import main

def greedy(*_, **__):
    # What is there and half a gigabyte, and a match that needs four.
    most = psutil.Process().memory_info().vms + (1 << 29)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    return torch.empty(1 << 30)

engine.Problem.stack = greedy
sys.argv[0] = "bract"
main()
"""


@pytest.mark.processes
@pytest.mark.faults
def test_an_audit_whose_memory_is_limited_says_what_does_not_fit_and_goes_on_later(
    tmp_path: Path,
) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = small(
        data={"image_size": 16, "validation": 0.0},
        model={"name": "lenet-strided", "activation": "relu"},
        training={"local_steps": 1, "batch_size": 2},
    )
    run = train(tmp_path, config, small_grid(tmp_path, config))
    (tmp_path / "limited.py").write_text(LIMITED)
    chosen = ("audit", run.root.name, "--attack", "ig", "--budget", "5", "--yes", "--resume")
    begun = time.monotonic()
    limited = Command(tmp_path, *chosen, module="limited", PYTHONPATH=python_path(tmp_path))
    code, said = limited.finish()
    refusals = [result.refused or "" for result in results(run)]
    measured("`bract audit` in limited memory", code, time.monotonic() - begun, refusals[0])
    assert code == 4, said
    assert "Traceback" not in said
    assert len(refusals) == 3
    assert all("one restart does not fit into the memory of cpu" in why for why in refusals)
    assert limited.nothing_is_left()
    code, said = Command(tmp_path, *chosen).finish()
    assert code == 0, said
    assert [result.refused for result in results(run)] == [None] * 3


def results(run: RunDirectory) -> list[AuditResult]:
    found = sorted((run.root / "audit").rglob("round-*.json"))
    return [AuditResult.parse_text(path.read_text(), source=path.name) for path in found]
