"""The time that a whole audit may take, shared by the attacks that are left."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST = 0.5
"""Seconds that the search of one attack is given at the least."""


class Allowance:
    """Wall time of a whole audit, all its tiers, in even shares.

    An attack takes longer than its share: it opens an upload, scores what it found, and looks at
    the clock between steps alone. How much longer is learned from the attacks that are done, so
    that the shares of the others become smaller and the whole keeps to its time.

    Parameters
    ----------
    seconds
        Of the whole audit, from `begin` on.
    attacks
        How many attacks there are on single observations.
    """

    def __init__(
        self, seconds: float, attacks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.left = seconds, max(1, attacks)
        self._clock = clock
        self._begun: float | None = None
        self._over: list[float] = []
        self.share = seconds / self.left

    @property
    def remaining(self) -> float:
        """Seconds that are left, not below zero."""
        spent = 0.0 if self._begun is None else self._clock() - self._begun
        return max(0.0, self.seconds - spent)

    @property
    def is_spent(self) -> bool:
        """Whether no further attack may begin; the first one always may."""
        return bool(self._over) and self.remaining <= 0.0

    def begin(self) -> None:
        """Start the clock with the first attack, and take the share of the next one."""
        if self._begun is None:
            self._begun = self._clock()
        over = max(0.0, sum(self._over) / len(self._over)) if self._over else 0.0
        self.share = max(LEAST, self.remaining / self.left - over)

    def finish(self, attacks: int, seconds: float) -> None:
        """Count attacks as done, which took so many seconds together."""
        self.left = max(1, self.left - attacks)
        self._over.append(seconds / max(1, attacks) - self.share)
