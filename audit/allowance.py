"""The time that a whole audit may take, shared by the attacks that are left."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

LEAST = 0.5
"""Seconds that the search of one attack is given at the least."""

LATE = 0.5
"""Share of the whole budget by which an attack may overrun what is left, before it is cut off. An
attack that is cut off shows nothing, so a busy machine is given some time."""

LEAST_LATE = 10.0
"""Seconds of that at the least: a step between two looks at the clock may take seconds."""


class CutOffError(BaseException):
    """An attack went on when the time of the whole audit was over.

    No `Exception`, which an attack that tries several methods would take for one that failed.
    """


class Allowance:
    """Wall time of a whole audit, all its tiers, in even shares.

    An attack takes longer than its share: it opens an upload, scores what it found, and looks at
    the clock between steps alone. How much longer is learned from the attacks that are done, so
    that the shares of the others become smaller and the whole keeps to its time.

    Parameters
    ----------
    seconds
        Of the whole audit, from here on: estimating the work counts.
    attacks
        How many attacks there are on single observations.
    """

    def __init__(
        self, seconds: float, attacks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.left = seconds, max(1, attacks)
        self._clock = clock
        self._begun = clock()
        self._over: list[float] = []
        self.share = seconds / self.left

    @property
    def remaining(self) -> float:
        """Seconds that are left, not below zero."""
        return max(0.0, self.seconds - (self._clock() - self._begun))

    @property
    def is_spent(self) -> bool:
        """Whether no further attack may begin; the first one always may."""
        return bool(self._over) and self.remaining <= 0.0

    def begin(self) -> None:
        """Take the share of the next attack."""
        over = max(0.0, sum(self._over) / len(self._over)) if self._over else 0.0
        self.share = max(LEAST, self.remaining / self.left - over)

    def finish(self, attacks: int, seconds: float) -> None:
        """Count attacks as done, which took so many seconds together."""
        self.left = max(1, self.left - attacks)
        self._over.append(seconds / max(1, attacks) - self.share)

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Raise `CutOffError` in the block once the whole time is over by half.

        A closed form or a step that never looks at the clock is so ended too, between two
        instructions of Python. In a thread other than the main one nothing is.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def cut(_: int, __: object) -> None:
            raise CutOffError

        earlier = signal.signal(signal.SIGALRM, cut)
        late = max(LEAST_LATE, LATE * self.seconds)
        others, _ = signal.setitimer(signal.ITIMER_REAL, max(LEAST, self.remaining) + late)
        begun = time.monotonic()
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, earlier)
            if others:
                left = others - (time.monotonic() - begun)
                signal.setitimer(signal.ITIMER_REAL, max(0.001, left))
