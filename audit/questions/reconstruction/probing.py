"""Estimate what an attack costs from a moment of it."""

from __future__ import annotations

import time

from bract.attacks import Progress

PROBED = 8
"""Most restarts, over all uploads, that a probe attacks at once."""


class EnoughError(BaseException):
    """A probe has run long enough."""


class Pace:
    """The reports of an attack that is stopped after some seconds.

    Parameters
    ----------
    seconds
        Once they are over, and two reports came, a report raises `EnoughError`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._begun = seconds, time.perf_counter()
        self._reports: list[tuple[float, float]] = []

    def spent(self) -> float:
        """Return the seconds since the attack began."""
        return time.perf_counter() - self._begun

    def report(self, progress: Progress) -> None:
        """Note what share of the attack is done."""
        spent = self.spent()
        if progress.fraction > (self._reports[-1][1] if self._reports else 0.0):
            self._reports.append((spent, progress.fraction))
        if spent > self._seconds and len(self._reports) > 1:
            raise EnoughError

    def whole(self) -> float:
        """Return the seconds of the whole attack: up to the first report, and then at its pace."""
        (first, from_share), (last, share) = self._reports[0], self._reports[-1]
        return first + (last - first) * (1 - from_share) / (share - from_share)
