"""Jobs on the machines of a Ray cluster; none works on after its pool."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from bract.errors import BractError, RunFailedError, one_line
from bract.pool.jobs import Job, Lost, Note, Outcome

POLL = 0.5
"""Seconds between two looks at how far the workers are."""

_log = logging.getLogger(__name__)


class Ray(Generic[Job, Outcome]):
    """Does jobs in workers of a cluster, which start with the first jobs.

    A worker that is lost costs the job that it had; another takes its place.

    Parameters
    ----------
    ray
        The module, connected to the cluster.
    do
        Called with a job, and with a function that takes a note of the job's progress; it must be
        picklable, as jobs, notes and outcomes must.
    workers
        Most workers, for which the cluster has room.
    threads, gpus
        Cores and GPUs that Ray keeps for each worker.
    folders
        Every machine sees them at these absolute paths.
    """

    def __init__(
        self,
        ray: Any,
        do: Callable[[Job, Note], Outcome],
        *,
        workers: int,
        threads: int = 1,
        gpus: float = 0.0,
        folders: Sequence[Path] = (),
    ) -> None:
        self.workers = workers
        self._ray = ray
        self._do, self._given = do, ([str(folder) for folder in folders], str(Path.cwd()))
        self._kind = ray.remote(
            num_cpus=threads,
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=2,  # a job, and a question for its progress
        )(Worker)
        self._idle: list[_Placed] = []
        self._busy: dict[Any, _Placed] = {}

    def __enter__(self) -> Ray[Job, Outcome]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def run(
        self, jobs: Iterable[Job], noted: Callable[[Job, object], None] | None = None
    ) -> Iterator[tuple[Job, Outcome | Lost]]:
        """Do all jobs, as `Pool` says.

        Raises
        ------
        BractError
            If a machine does not see a folder.
        RunFailedError
            If a worker can do no job at all, as on a machine without this package.
        """
        waiting = deque(jobs)
        while waiting or self._busy:
            while waiting and len(self._busy) < self.workers:
                self._hand_out(waiting.popleft())
            ready, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=POLL)
            for reference in ready:
                placed = self._busy[reference]
                outcome = self._outcome(reference)
                del self._busy[reference]
                if not isinstance(outcome, Lost):
                    self._idle.append(placed)
                elif placed.jobs > 1 and not placed.began:
                    self._end(placed)  # It was lost while it was idle, not by this job.
                    waiting.appendleft(placed.job)
                    continue
                else:
                    self._end(placed)
                yield placed.job, outcome
            self._look(noted)

    def close(self) -> None:
        """End all workers, also those in the middle of a job."""
        for placed in [*self._idle, *self._busy.values()]:
            self._end(placed)
        self._idle.clear()
        self._busy.clear()

    def _hand_out(self, job: Job) -> None:
        placed = self._idle.pop() if self._idle else _Placed(self._kind.remote(*self._given))
        placed.job, placed.began, placed.asked = job, False, None
        placed.jobs += 1
        # What it lacks to read the function is an error of the call, not of the worker.
        first = self._do if placed.jobs == 1 else None
        self._busy[placed.handle.do.remote(job, first)] = placed

    def _outcome(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise _raised_there(error) from None
        except errors.RayError as error:
            return Lost(f"its worker was lost: {one_line(error, 300)}")

    def _look(self, noted: Callable[[Job, object], None] | None) -> None:
        """Ask workers for their progress, and read earlier answers without waiting."""
        for placed in self._busy.values():
            if placed.asked is not None:
                if not self._ray.wait([placed.asked], timeout=0)[0]:
                    continue
                with contextlib.suppress(Exception):  # the job itself shows it
                    begun, what = self._ray.get(placed.asked)
                    placed.began = begun == placed.jobs
                    if placed.began and what is not None and noted is not None:
                        noted(placed.job, what)
            placed.asked = placed.handle.state.remote()

    def _end(self, placed: _Placed) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(placed.handle)


class Worker:
    """Does jobs in a process of the cluster.

    Parameters
    ----------
    folders
        Those that this machine must see.
    path
        Folder that modules may be imported from, as at the process that asks.
    """

    def __init__(self, folders: Sequence[str], path: str) -> None:
        self._folders = folders
        self._do: Callable[[Any, Note], Any] | None = None
        self._begun, self._note = 0, None
        if path not in sys.path:
            sys.path.insert(0, path)
        logging.disable(logging.ERROR)  # an outcome has its error

    def do(self, job: Any, first: Callable[[Any, Note], Any] | None) -> Any:
        """Do a job and return its outcome.

        Parameters
        ----------
        first
            Does this job and later ones; None is that of the first job.

        Raises
        ------
        BractError
            If this machine does not see a folder.
        """
        for folder in self._folders:
            if not Path(folder).is_dir():
                raise BractError(
                    f"{folder}: not on {socket.gethostname()}; every machine of the cluster must "
                    "see it at this path, as on a shared file system",
                    code="file-missing",
                )
        self._do = first or self._do
        assert self._do is not None
        self._note = None
        self._begun += 1
        return self._do(job, self._take)

    def state(self) -> tuple[int, Any]:
        """Return the number of jobs begun, and the last note; another thread reads it."""
        return self._begun, self._note

    def _take(self, what: Any) -> None:
        self._note = what


@dataclass(eq=False)
class _Placed:
    """A worker: its handle, its job, how many it was given, and whether it began the last."""

    handle: Any
    job: Any = None
    jobs: int = 0
    began: bool = False
    asked: Any = None


def _raised_there(error: Exception) -> BractError:
    """Return what a worker raised, as an error of this command."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, BractError):
        cause.args = (f"a worker: {cause}",)
        return cause
    _log.debug("%s", error)
    return RunFailedError(f"a worker failed: {one_line(repr(cause), 500)}", code="worker-failed")
