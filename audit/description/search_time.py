"""The time in which other descriptions are looked for, and what was left out for want of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

SECONDS = 60.0
"""Processor time in which ``bract describe`` looks for other descriptions."""


class OutOfTimeError(Exception):
    """No time is left to simulate a client."""


def _untold(words: str) -> None:
    del words


@dataclass
class SearchTime:
    """Processor time of this thread, so that what is found depends on nothing else that runs.

    Attributes
    ----------
    seconds
        From now on.
    tell
        Takes the words of each description that is tried.
    untried
        What was not tried for want of time, in words.
    """

    seconds: float = SECONDS
    tell: Callable[[str], None] = _untold
    untried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = time.thread_time() + self.seconds

    @property
    def is_over(self) -> bool:
        """Return whether no time is left."""
        return time.thread_time() > self._end

    def check(self) -> None:
        """Raise `OutOfTimeError` if no time is left."""
        if self.is_over:
            raise OutOfTimeError

    def miss(self, words: Iterable[str]) -> None:
        """Note what is not tried."""
        self.untried += [one for one in words if one not in self.untried]
