"""How batches are handed to workers, without any, and what comes back."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from audited import audited_run
from fake_ray import FakeRay, LostError
from refusals import check_named, refused

from bract.audit.audit import Audit
from bract.audit.audit_pool import ATTEMPTS, Attacking, AuditPool, Failed, spread
from bract.audit.worker import Worker
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError
from bract.installed import PluginError
from bract.pool import Lost, Ray
from bract.rundir import RunDirectory

CHOICE = AuditRequest(attacks=["ig"], iterations=2, device="cpu", batch=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audited_run(tmp_path_factory.mktemp("made") / "run", uploads=3).root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(made, tmp_path / "run"))


class OneProcess:
    """Does jobs here, as for two workers; ``ending`` may replace the outcome of the n-th one."""

    workers = 2

    def __init__(self, root: Path, ending: Callable[[int], Any] = lambda _: None) -> None:
        self._do, self._ending, self.begun = Attacking(root, 1), ending, 0

    def run(self, jobs: Iterable[Any], noted: Any = None) -> Iterator[tuple[Any, Any]]:
        for job in jobs:
            self.begun += 1
            ending = self._ending(self.begun)
            yield job, ending or self._do(job, partial(noted, job))


def audited(
    run: RunDirectory, ending: Callable[[int], Any] = lambda _: None
) -> tuple[list[str], OneProcess, list[tuple[float, str]]]:
    audit, workers = Audit(run, CHOICE), OneProcess(run.root, ending)
    shown: list[tuple[float, str]] = []
    audit.begin(audit.plan())
    pool = AuditPool("cpu", workers)
    found = pool.execute(audit, audit.plan(), lambda *state: shown.append(state))
    return sorted(str(result.client) for result in found), workers, shown


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
        audited(run, lambda n: Failed(RunFailedError("full")) if n > 1 else None)
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
        audited(run, lambda n: Failed(BractError("no such folder", code="usage")))
    clients, _, _ = audited(run, lambda n: Failed(PluginError("theirs")) if n == 1 else None)
    assert clients == ["client-1", "client-2"]
    assert "theirs" in caplog.text

    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Worker, "attack", fail)
    with refused("worker-failed", "KeyError", kind=RunFailedError):
        audited(run)


def test_fewer_batches_than_processes_are_divided(run: RunDirectory) -> None:
    (whole,) = Audit(run, CHOICE.model_copy(update={"batch": None})).plan()
    assert len(whole.captures) == 3
    for count, sizes in ((1, [3]), (2, [1, 2]), (3, [1, 1, 1]), (8, [1, 1, 1])):
        found = spread([whole], count)
        assert [len(batch.captures) for batch in found] == sizes
        assert [c.key for b in found for c in b.captures] == [c.key for c in whole.captures]
    assert spread([], 2) == []


def test_what_is_handed_back_is_checked(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("text", {"round-0001--client-0.json": "text"}, {1: b""}):
        monkeypatch.setattr(Worker, "attack", lambda *_, wrong=wrong: wrong)
        with refused("worker-failed"):
            audited(run)
    assert not list(run.audit.glob("ig/*.json"))


def test_a_clusters_workers_attack_on_its_device_and_a_lost_one_costs_its_batch(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    lost = iter([LostError("killed")])
    ray = FakeRay(lambda job: next(lost, None))
    audit = Audit(run, CHOICE)
    do = Attacking(run.root, 1)
    with Ray(ray, do, workers=2, folders=[run.root]) as workers:
        found = AuditPool("cpu", workers).execute(audit, audit.plan(), lambda *_: None)
        assert sorted(str(r.client) for r in found) == ["client-0", "client-1", "client-2"]
    logging.disable(logging.NOTSET)
    assert len(ray.done) == 3 + 1
    assert {job.request.device for job in ray.done} == {"cpu"}
    assert ray.alive == 0
