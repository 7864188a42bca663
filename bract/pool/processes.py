"""Jobs in child processes, none of which outlives this process.

A child that dies costs the job that it had; another takes its place. Children ignore a terminal's
Ctrl-C: this process ends them. If it is killed itself, each of them ends at once.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Generic

from bract.pool.jobs import Job, Lost, Note, Outcome

_UNHEARD = {signal.SIGINT, signal.SIGHUP}
"""Signals that a terminal sends to children, too."""

_PATIENCE = 1.0
"""Seconds for which a child's end by SIGTERM waits for this process's own."""

_EVERY = 0.2
"""Seconds between two notes of a child at least."""


class Processes(Generic[Job, Outcome]):
    """Does jobs in up to ``count`` child processes, which start with the first jobs.

    Parameters
    ----------
    do
        Called with a job and a function that takes a note of the job's progress; it must be
        picklable, as jobs, notes and outcomes must, and an exception of it ends the child.
    """

    def __init__(self, do: Callable[[Job, Note], Outcome], count: int) -> None:
        self._do, self.workers = do, count
        self._idle: list[_Child[Job, Outcome]] = []
        self._busy: dict[connection.Connection, tuple[_Child[Job, Outcome], Job]] = {}

    def __enter__(self) -> Processes[Job, Outcome]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def run(
        self, jobs: Iterable[Job], noted: Callable[[Job, object], None] | None = None
    ) -> Iterator[tuple[Job, Outcome | Lost]]:
        """Do all jobs, as `Pool` says."""
        waiting = deque(jobs)
        while waiting or self._busy:
            while waiting and len(self._busy) < self.workers:
                self._hand_out(waiting.popleft())
            for ready in connection.wait(list(self._busy)):
                assert isinstance(ready, connection.Connection)
                child, job = self._busy[ready]
                said = child.said()
                if isinstance(said, _Begun):
                    child.began = True
                    continue
                if isinstance(said, _Noted):
                    if noted is not None:
                        noted(job, said.what)
                    continue
                del self._busy[ready]
                if isinstance(said, _Done):
                    self._idle.append(child)
                    yield job, said.outcome
                elif child.served and not child.began:
                    child.end()  # It died while it was idle, not of this job.
                    waiting.appendleft(job)
                else:
                    yield job, Lost(child.ending())

    def close(self) -> None:
        """End all children, also those in the middle of a job."""
        for child in [*self._idle, *(child for child, _ in self._busy.values())]:
            child.end()
        self._idle.clear()
        self._busy.clear()

    def _hand_out(self, job: Job) -> None:
        while self._idle:
            child = self._idle.pop()
            if child.take(job):
                self._busy[child.pipe] = child, job
                return
            child.end()
        child = _Child(self._do)
        self._busy[child.pipe] = child, job
        child.take(job)  # One that is dead already shows it by its closed pipe.


@dataclass(frozen=True)
class _Begun:
    """A child received its job."""


@dataclass(frozen=True)
class _Noted:
    what: object


@dataclass(frozen=True)
class _Done(Generic[Outcome]):
    outcome: Outcome


class _Child(Generic[Job, Outcome]):
    """One child process and the pipe to it."""

    def __init__(self, do: Callable[[Job, Note], Outcome]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, do), name="bract-worker", daemon=True
        )
        # A child has these signals blocked from its first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.served = False
        self.began = False

    def take(self, job: Job) -> bool:
        """Give it a job; return whether it lives to take it."""
        self.began = False
        try:
            self.pipe.send(job)
        except OSError:
            return False
        return True

    def said(self) -> _Begun | _Noted | _Done[Outcome] | None:
        """Return what it sent, None if it died."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(found, _Begun | _Noted | _Done)
        self.served = self.served or isinstance(found, _Done)
        return found

    def ending(self) -> str:
        """Return how it ended, in words."""
        self._process.join()
        code = self._process.exitcode or 0
        self.end()
        if code == -signal.SIGTERM:
            # The signal may have gone to all processes of the group, to this one in a moment.
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


def _serve(pipe: connection.Connection, do: Callable[[Job, Note], Outcome]) -> None:
    """Do jobs until no more come."""
    for number in _UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.ERROR)  # an outcome has its error
    threading.Thread(target=_end_with_parent, daemon=True).start()
    last = 0.0

    def note(what: object) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY:
            pipe.send(_Noted(what))
            last = time.monotonic()

    with contextlib.suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            pipe.send(_Begun())
            pipe.send(_Done(do(job, note)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
