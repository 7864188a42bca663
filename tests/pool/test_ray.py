"""What a pool asks of a Ray cluster, without a Ray."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay, LostError, RaisedError
from refusals import check_named, refused

from bract.errors import BractError, RunFailedError
from bract.pool import Here, Lost, Note, Pool, Ray
from bract.schema.record import RecordError


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    logging.disable(logging.NOTSET)


class Doubling:
    """Doubles numbers, and counts the jobs that it did where it is."""

    def __init__(self) -> None:
        self.jobs = 0

    def __call__(self, job: int, note: Note) -> tuple[int, int]:
        self.jobs += 1
        note(job)
        return 2 * job, self.jobs


def test_every_job_is_done_once_with_as_many_at_once_as_there_is_room_for() -> None:
    ray = FakeRay()
    with Ray(ray, Doubling(), workers=2, threads=3, gpus=0.5) as pool:
        found: dict[int, Any] = dict(pool.run([1, 2, 3, 4, 5]))
        assert pool.workers == 2 and ray.alive == 2
    assert {job: outcome[0] for job, outcome in found.items()} == {n: 2 * n for n in range(1, 6)}
    assert ray.most == ray.started == 2
    assert ray.options == {
        "num_cpus": 3,
        "num_gpus": 0.5,
        "max_restarts": 0,
        "max_concurrency": 2,
    }
    assert max(outcome[1] for outcome in found.values()) > 1, "a worker stays for further jobs"
    assert ray.alive == 0, "none works on after its pool"


def test_a_worker_that_is_lost_costs_its_job_alone() -> None:
    ray = FakeRay(lambda job: LostError("killed\nfor memory") if job == 2 else None)
    with Ray(ray, Doubling(), workers=3) as pool:
        found: dict[int, Any] = dict(pool.run([1, 2, 3]))
    assert found.pop(2) == Lost("its worker was lost: killed for memory")
    assert {job: outcome[0] for job, outcome in found.items()} == {1: 2, 3: 6}
    assert ray.alive == 0


def test_a_worker_that_was_lost_while_it_was_idle_costs_no_job() -> None:
    ray = FakeRay(lambda job: LostError("node gone") if job == 2 and ray.started == 1 else None)
    with Ray(ray, Doubling(), workers=1) as pool:
        assert dict(pool.run([1, 2])) == {1: (2, 1), 2: (4, 1)}
    assert ray.done == [1, 2, 2] and ray.started == 2


def test_a_job_that_a_used_worker_began_is_lost_with_it() -> None:
    ray = FakeRay(lambda job: LostError("killed") if job == 2 else None, waits=3)
    with Ray(ray, Doubling(), workers=1) as pool:
        found = dict(pool.run([1, 2]))
    assert found == {1: (2, 1), 2: Lost("its worker was lost: killed")}
    assert ray.done == [1, 2]


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (BractError("no such folder", code="usage"), BractError, "a worker: no such folder"),
        (RecordError("a.json", "no JSON"), RecordError, "a worker: a.json: half-written"),
        (KeyError("x"), RunFailedError, "a worker failed: KeyError"),
    ],
)
def test_what_a_worker_raises_ends_the_run(
    cause: Exception, kind: type[Exception], said: str
) -> None:
    ray = FakeRay(lambda _: RaisedError(cause))
    with pytest.raises(kind, match=said), Ray(ray, Doubling(), workers=2) as pool:
        list(pool.run([1, 2]))
    assert ray.alive == 0


def test_a_machine_that_sees_no_folder_says_which(tmp_path: Path) -> None:
    missing = tmp_path / "elsewhere"
    with (
        refused("file-missing", missing) as caught,
        Ray(FakeRay(), Doubling(), workers=1, folders=[tmp_path, missing]) as pool,
    ):
        list(pool.run([1]))
    check_named(str(caught.value), "every machine of the cluster")


class Noting:
    """Notes each job, and returns it."""

    def __call__(self, job: int, note: Note) -> int:
        note(f"began {job}")
        return job


@pytest.mark.parametrize("pool", [Here(Noting()), Ray(FakeRay(waits=3), Noting(), workers=1)])
def test_notes_of_a_job_are_passed_on(pool: Pool[int, int]) -> None:
    noted: set[tuple[int, object]] = set()
    found = list(pool.run([3, 4], lambda job, what: noted.add((job, what))))
    assert found == [(3, 3), (4, 4)]
    assert noted == {(3, "began 3"), (4, "began 4")}
    assert list(pool.run([5])) == [(5, 5)], "nobody takes notes"
