"""The clock by which bounded work is timed: the wall's, or one that leaves out what others took.

Work that has a budget in seconds reads `now`. Who gives the budget chooses the clock for the
thread, with `timed_by`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Clock = Callable[[], float]
"""Returns seconds since a moment of its own; it never runs backwards."""

_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


def now() -> float:
    """Return a reading in seconds of the clock of this thread, by default `time.perf_counter`."""
    clock = _CLOCK.get()
    return time.perf_counter() if clock is None else clock()


def current() -> Clock:
    """Return the clock of this thread, for another thread to read."""
    return _CLOCK.get() or time.perf_counter


@contextmanager
def timed_by(clock: Clock) -> Iterator[None]:
    """Let `now` read a clock in the block, in this thread."""
    token = _CLOCK.set(clock)
    try:
        yield
    finally:
        _CLOCK.reset(token)


PATIENCE = 4.0
"""Most wall seconds that a second of work waits for where others have the processor."""


class ProcessorClock:
    """Seconds that the processor gave the thread which makes the clock, wherever it is read.

    It runs at least at a share of the wall's rate, so that a budget by it ends in a known time.
    Where the system does not tell one thread's time to another (macOS), it is the wall's clock.

    Parameters
    ----------
    patience
        Most wall seconds for one second of the clock, at least 1.
    wall, processor
        Return wall and processor seconds; by default this machine's and the making thread's.
    """

    def __init__(
        self,
        patience: float = PATIENCE,
        wall: Clock = time.monotonic,
        processor: Clock | None = None,
    ) -> None:
        if patience < 1.0:
            raise ValueError(f"patience is {patience}, expected at least 1")
        self._patience, self._wall = patience, wall
        self._processor = processor or _thread_seconds() or wall
        self._began = (wall(), self._processor())

    def __call__(self) -> float:
        """Return the clock's seconds since it was made."""
        return max(self._processor() - self._began[1], self.wall() / self._patience)

    def wall(self) -> float:
        """Return the wall's seconds since the clock was made."""
        return self._wall() - self._began[0]


def _thread_seconds() -> Clock | None:
    """Return a function that reads this thread's processor time from any thread."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    number = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(number)
