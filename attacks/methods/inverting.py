"""The base of attacks that read what entered a layer, and then find the examples that make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from bract.attacks.base import Attack
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.reading import Inverse, Reading
from bract.attacks.result import Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.errors import BractError
from bract.process import clock

_LEAST_SHARE = 0.1
"""Least share of a budget in seconds that is left to the inverse."""


@dataclass(frozen=True, kw_only=True)
class InvertingAttack(Attack, Reading, Inverse):
    """Read what entered a layer, then find the examples that make it enter.

    `best` inverts the reading that an update determines best (`Determined.order`), of all that
    apply, and keeps images below `found_below`.
    """

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack where there is no noise, under which a prior must decide."""
        return self if problem.likelihood is None else None

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Read each capture, and invert what was read."""
        begun, read = clock.now(), list[Entered]()
        for found in self.read_each(problem, run):
            if isinstance(found, Refusal):
                raise BractError(found.reason, code=found.code)
            read.append(found)
        return self.certified(problem, left_of(run, begun), read)

    def certified(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Return what `inverted` finds, with the certificate of each reading."""
        return self.inverted(problem, run, read).read_by([one.certificate for one in read])


def left_of(run: Run, begun: float) -> Run:
    """Return the part of a run that a reading left, which began at ``begun``."""
    if run.seconds is None:
        return run
    left = run.seconds - (clock.now() - begun)
    return replace(run, seconds=max(left, _LEAST_SHARE * run.seconds))
