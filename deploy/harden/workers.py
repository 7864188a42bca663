"""Jobs in child processes, one thread each, none of which outlives this process.

A worker that dies costs the job that it had, whose outcome names how it ended; another takes its
place. Workers hear nothing of a terminal's Ctrl-C: this process ends them. Where it is killed
itself, each of them ends at once, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection as connection
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.context import SpawnProcess
from types import TracebackType

from bract.deploy.harden.work import Bench, Job, Outcome, work

_UNHEARD = {signal.SIGINT, signal.SIGHUP}
"""Signals that a terminal sends to workers, too."""

_PATIENCE = 1.0
"""Seconds for which a worker's end by SIGTERM waits for this process's own."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Does jobs in up to ``count`` child processes, which start with the first jobs.

    Parameters
    ----------
    bench
        Goes to each worker; it must be picklable.
    """

    def __init__(self, bench: Bench, count: int) -> None:
        self._bench, self._count = bench, count
        self._idle: list[_Worker] = []
        self._busy: dict[connection.Connection, tuple[_Worker, Job]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Do all jobs and yield the outcome of each as it comes."""
        waiting = deque(jobs)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._count:
                self._hand_out(waiting.popleft())
            for ready in connection.wait(list(self._busy)):
                assert isinstance(ready, connection.Connection)
                worker, job = self._busy[ready]
                outcome = worker.outcome()
                del self._busy[ready]
                if outcome is None:
                    outcome = Outcome(error=worker.fate())
                else:
                    self._idle.append(worker)
                yield job, outcome

    def close(self) -> None:
        """End all workers, also those in the middle of a job."""
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()
        self._idle.clear()
        self._busy.clear()

    def _hand_out(self, job: Job) -> None:
        while self._idle:
            worker = self._idle.pop()
            if worker.take(job):
                self._busy[worker.pipe] = worker, job
                return
            worker.end()
        worker = _Worker(self._bench)
        self._busy[worker.pipe] = worker, job
        worker.take(job)  # One that is dead already shows it by its closed pipe.


class _Worker:
    """One child process and the pipe to it."""

    def __init__(self, bench: Bench) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, bench), name="bract-harden", daemon=True
        )
        # A worker has these signals blocked from its first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def take(self, job: Job) -> bool:
        """Give it a job; return whether it lives to take it."""
        try:
            self.pipe.send(job)
        except OSError:
            return False
        return True

    def outcome(self) -> Outcome | None:
        """Return the outcome that it sent, None if it died."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(found, Outcome)
        return found

    def fate(self) -> str:
        """Return how it ended, in words."""
        self._process.join()
        code = self._process.exitcode or 0
        self.end()
        if code == -signal.SIGTERM:
            # The signal may have gone to all processes of the search, to this one in a moment.
            time.sleep(_PATIENCE)
        if code >= 0:
            return f"its worker process ended with exit code {code}"
        name = signal.strsignal(-code) or "unknown"
        return f"its worker process was ended by signal {-code} ({name})"

    def end(self) -> None:
        """End it in whatever it does."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(pipe: connection.Connection, bench: Bench) -> None:
    """Do jobs until no more come."""
    import torch

    for number in _UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.ERROR)  # a candidate's record has its error
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            pipe.send(work(bench, job))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
