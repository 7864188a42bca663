"""Jobs, and the pool that does them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")
_Outcome = TypeVar("_Outcome", covariant=True)
Note = Callable[[object], None]
"""Takes a note of how far a job is."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Lost:
    """The outcome of a job whose worker died: how it ended, in words."""

    reason: str


class Pool(Protocol[Job, _Outcome]):
    """Does jobs, several at once where it has several workers."""

    @property
    def workers(self) -> int:
        """Most jobs at once, at least one."""

    def run(
        self, jobs: Iterable[Job], noted: Callable[[Job, object], None] | None = None
    ) -> Iterator[tuple[Job, _Outcome | Lost]]:
        """Do all jobs and yield the outcome of each as it comes, in any order.

        Parameters
        ----------
        noted
            Called with a job and what was last noted of it, a few times a second at most.
        """


class Here(Generic[Job, Outcome]):
    """Does one job after the other in this process.

    Parameters
    ----------
    do
        Called with a job, and with a function that takes a note of the job's progress.
    """

    workers = 1

    def __init__(self, do: Callable[[Job, Note], Outcome]) -> None:
        self._do = do

    def run(
        self, jobs: Iterable[Job], noted: Callable[[Job, object], None] | None = None
    ) -> Iterator[tuple[Job, Outcome | Lost]]:
        """Do all jobs in order, as `Pool` says."""
        for job in jobs:

            def note(what: object, job: Job = job) -> None:
                if noted is not None:
                    noted(job, what)

            yield job, self._do(job, note)
