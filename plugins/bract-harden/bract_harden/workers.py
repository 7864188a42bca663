"""The federations of a search in child processes of this machine, one thread each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from bract.child_processes import ChildProcesses, Lost, Note
from bract_harden.work import Federations, Job, Outcome, work


class Workers:
    """Does jobs in child processes; one that dies costs the job that it had."""

    def __init__(self, children: ChildProcesses[Job, Outcome]) -> None:
        self._children = children

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Do all jobs and yield the outcome of each as it comes."""
        for job, outcome in self._children.run(jobs):
            yield job, Outcome(error=outcome.ending) if isinstance(outcome, Lost) else outcome


@contextmanager
def workers(federations: Federations, count: int) -> Iterator[Workers]:
    """Have up to ``count`` workers while the block runs.

    Parameters
    ----------
    bench
        Goes to each worker; it must be picklable.
    """
    with ChildProcesses(partial(_done, federations), count) as children:
        yield Workers(children)


def _done(federations: Federations, job: Job, note: Note) -> Outcome:
    import torch

    del note
    torch.set_num_threads(1)
    return work(federations, job)
