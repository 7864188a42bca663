"""How batches are handed to processes of this machine, and when there are any: no real one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from audited import audited_run
from refusals import check_named, refused

from bract.audit.audit import Audit
from bract.audit.worker import Worker
from bract.child_processes import Lost
from bract.cli import audit_processes
from bract.cli.audit_processes import (
    Processes,
    _Attacking,
    _Failed,
    count_for,
    processes_of,
    spread,
)
from bract.cli.audit_workers import ATTEMPTS
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError
from bract.plugins import PluginError
from bract.rundir import RunDirectory

CHOICE = AuditRequest(attacks=["ig"], iterations=2, device="cpu", batch=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audited_run(tmp_path_factory.mktemp("made") / "run", uploads=3).root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(made, tmp_path / "run"))


class InThisProcess:
    """Does jobs here; ``ending`` may replace the outcome of the n-th one."""

    def __init__(self, root: Path, ending: Callable[[int], Any] = lambda _: None) -> None:
        self._do, self._ending, self.begun = _Attacking(root, 1), ending, 0

    def run(self, jobs: Iterable[Any], noted: Any) -> Iterator[tuple[Any, Any]]:
        for job in jobs:
            self.begun += 1
            ending = self._ending(self.begun)
            yield job, ending or self._do(job, partial(noted, job))


def audited(
    run: RunDirectory, ending: Callable[[int], Any] = lambda _: None
) -> tuple[list[str], InThisProcess, list[tuple[float, str]]]:
    audit, children = Audit(run, CHOICE), InThisProcess(run.root, ending)
    processes = Processes("cpu", 2, cast(Any, children))
    shown: list[tuple[float, str]] = []
    audit.begin(audit.plan())
    found = processes.execute(audit, audit.plan(), lambda *state: shown.append(state))
    return sorted(str(result.client) for result in found), children, shown


def test_every_batch_is_attacked_once_and_its_progress_shown(run: RunDirectory) -> None:
    clients, children, shown = audited(run)
    assert clients == ["client-0", "client-1", "client-2"]
    assert children.begun == 3
    assert len(list((run.audit / "ig").glob("*.json"))) == 3
    assert all(0.0 <= share <= 1.0 and said.startswith("1 workers") for share, said in shown)
    assert shown


def test_an_audit_that_does_not_resume_first_removes_what_it_replaces(run: RunDirectory) -> None:
    audited(run)
    with pytest.raises(RunFailedError):
        audited(run, lambda n: _Failed(RunFailedError("full")) if n > 1 else None)
    assert len(list((run.audit / "ig").glob("*.json"))) == 1


def test_a_process_that_dies_costs_its_batch_which_is_begun_again(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("bract").propagate = True
    clients, children, _ = audited(run, lambda n: Lost("killed") if n == 2 else None)
    assert clients == ["client-0", "client-1", "client-2"]
    assert children.begun == 4
    check_named(caplog.text, "round-0001/client-1")


def test_a_batch_that_loses_every_process_ends_the_audit(run: RunDirectory) -> None:
    with refused("worker-failed", ATTEMPTS, "killed", kind=RunFailedError):
        audited(run, lambda n: Lost("killed") if n >= 3 else None)
    assert len(Audit(run, CHOICE, resume=True).plan()) == 1


def test_what_a_process_raises_ends_the_audit_unless_a_plugin_is_to_blame(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("bract").propagate = True
    with refused("usage"):
        audited(run, lambda n: _Failed(BractError("no such folder", code="usage")))
    clients, _, _ = audited(run, lambda n: _Failed(PluginError("theirs")) if n == 1 else None)
    assert clients == ["client-1", "client-2"]
    assert "theirs" in caplog.text

    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Worker, "attack", fail)
    with refused("worker-failed", "KeyError", kind=RunFailedError):
        audited(run)


def test_processes_are_started_where_the_work_is_worth_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(**changes: Any) -> int:
        audit = Audit(run, CHOICE.model_copy(update={"iterations": 48_000} | changes))
        return count_for([audit])

    monkeypatch.setattr(audit_processes, "cores", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert count() == 3, "a process a batch"
    assert count(iterations=2) == 1
    assert count(iterations=2, workers=2) == 2
    assert count(workers=1) == 1
    assert count(attacks=["auto"], iterations=4, restarts=4) == 1
    assert count(batch=3) == 1
    assert count(batch=None) == 3, "a batch of three is divided"
    assert count(seconds=60.0) == 3
    assert count(iterations=None, total_seconds=600.0) == 1, "its attacks share one time"
    with monkeypatch.context() as patched:
        patched.setattr("torch.get_num_threads", lambda: 4)
        assert count() == 2
    full = psutil.virtual_memory()._replace(available=5 << 29)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    assert count() == 2, "a gigabyte each"


def test_fewer_batches_than_processes_are_divided(run: RunDirectory) -> None:
    (whole,) = Audit(run, CHOICE.model_copy(update={"batch": None})).plan()
    assert len(whole.captures) == 3
    for count, sizes in ((1, [3]), (2, [1, 2]), (3, [1, 1, 1]), (8, [1, 1, 1])):
        found = spread([whole], count)
        assert [len(batch.captures) for batch in found] == sizes
        assert [c.key for b in found for c in b.captures] == [c.key for c in whole.captures]
    assert spread([], 2) == []


def test_one_process_is_this_one_and_removes_what_a_killed_audit_left(run: RunDirectory) -> None:
    left = run.root / ".workers" / "1" / "round-0001.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half an image")
    with processes_of([Audit(run, CHOICE)]) as processes:
        assert processes is None
        assert not (run.root / ".workers").exists()
