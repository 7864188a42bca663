"""The base of attacks that read what entered a layer, and then find the images that make it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from bract.attacks.methods.enlarging import EnlargingAttack
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.result import Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.task import OF_ONE_CASE, refusal
from bract.errors import BractError
from bract.seeds import trial_seed

_LEAST_SHARE = 0.1
"""Least share of a budget in seconds that is left to the descent."""


@dataclass(frozen=True, kw_only=True)
class InvertingAttack(EnlargingAttack):
    """Read what entered a layer, and descend to images that make it enter.

    Attributes
    ----------
    found_below
        Loss below which images are taken for those whose activations were read; None where the
        match of the update decides instead.
    """

    found_below: ClassVar[float | None] = None

    @abstractmethod
    def read(self, case: Case, seconds: float | None = None, seed: int = 0) -> Entered:
        """Return what entered.

        Parameters
        ----------
        seconds
            Wall time after which the reading stops; None leaves it without a limit.
        seed
            Of searches that a reading makes.

        Raises
        ------
        BractError
            If the update does not determine it, or no time was left.
        """

    @abstractmethod
    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Find images from what entered in each trial."""

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Read each capture, then descend stage by stage."""
        begun, read = time.perf_counter(), list[Entered]()
        for found in self.read_each(problem, run.seconds):
            if isinstance(found, Refusal):
                raise BractError(found.reason, code=found.code)
            read.append(found)
        return self.inverted(problem, left_of(run, begun), read)

    def read_each(self, problem: Problem, seconds: float | None) -> list[Entered | Refusal]:
        """Return what entered in every trial; trials of one observation share it."""
        begun = time.perf_counter()
        read: dict[int, Entered | Refusal] = {}
        for case in problem.cases:
            if id(case.observation) not in read:
                spent = time.perf_counter() - begun
                left = None if seconds is None else max(0.0, seconds - spent)
                seed = trial_seed(problem.seed, case.observation.key, 0) % 2**31
                read[id(case.observation)] = self._attempted(case, left, seed)
        return [read[id(case.observation)] for case in problem.cases]

    def _attempted(self, case: Case, seconds: float | None, seed: int) -> Entered | Refusal:
        try:
            return self.read(case, seconds, seed)
        except OF_ONE_CASE as error:
            return refusal(self.name, case.observation, error)


def left_of(run: Run, begun: float) -> Run:
    """Return the part of a run that a reading left, which began at ``begun``."""
    if run.seconds is None:
        return run
    left = run.seconds - (time.perf_counter() - begun)
    return replace(run, seconds=max(left, _LEAST_SHARE * run.seconds))
