"""The time that a whole audit may take, shared by the attacks that are left."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from bract.attacks.result import CutOffError
from bract.attacks.solve.cutting import cut_off_after

__all__ = ["Allowance", "CutOffError"]

LEAST = 0.5
"""Seconds that the search of one attack is given at the least."""

LATE = 0.5
"""Share of the whole budget by which an attack may overrun what is left, before it is cut off. What
a descent has found until then is kept."""

LEAST_LATE = 10.0
"""Seconds of that at the least: a step between two looks at the clock may take seconds."""


class Allowance:
    """Wall time of a whole audit, all its tiers, in shares.

    Shares are even where each of them is as much as an attack needs (`begin`). Where they are not,
    fewer attacks get what they need, and no further one begins when the time is over. An attack
    takes longer than its share: it opens an upload, scores what it found, and looks at the clock
    between steps alone. How much longer is learned from the attacks that are done, so
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
        self._ends: dict[str, float] = {}
        self.share = seconds / self.left

    @property
    def remaining(self) -> float:
        """Seconds that are left, not below zero."""
        return max(0.0, self.seconds - (self._clock() - self._begun))

    def is_spent(self, tier: str = "") -> bool:
        """True where no further attack of a tier may begin; the first one always may."""
        return bool(self._over) and self._remaining_of(tier) <= 0.0

    def open(self, tier: str, attacks: int) -> None:
        """Give a tier its part of what is left, for so many of the attacks that are left."""
        if tier not in self._ends:
            part = self.remaining * min(1.0, attacks / self.left)
            self._ends[tier] = self._clock() + part

    def begin(self, tier: str = "", *, need: float = 0.0, together: int = 1) -> None:
        """Take the share of the next attacks.

        Parameters
        ----------
        need
            Seconds that one of them needs; it gets as many where the tier has them.
        together
            Observations that are attacked at once.
        """
        over = max(0.0, sum(self._over) / len(self._over)) if self._over else 0.0
        even = self.remaining / self.left - over
        wanted = min(need, self._remaining_of(tier) / together)
        self.share = max(LEAST, even, wanted)

    def finish(self, attacks: int, seconds: float) -> None:
        """Count attacks as done, which took so many seconds together."""
        self.left = max(1, self.left - attacks)
        self._over.append(seconds / max(1, attacks) - self.share)

    def _remaining_of(self, tier: str) -> float:
        end = self._ends.get(tier)
        return self.remaining if end is None else min(self.remaining, end - self._clock())

    def bounded(self) -> AbstractContextManager[None]:
        """Raise `CutOffError` in the block once the whole time is over by half."""
        late = max(LEAST_LATE, LATE * self.seconds)
        return cut_off_after(max(LEAST, self.remaining) + late)
