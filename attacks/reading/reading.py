"""The contracts of a reading and of its inverse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.result import Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.task import OF_ONE_CASE, refusal
from bract.process import clock
from bract.seeds import trial_seed


@dataclass(frozen=True, kw_only=True)
class ReadingBudget:
    """Limits of one reading, its seed, and its progress.

    Attributes
    ----------
    seconds
        Wall time after which the reading stops; None leaves it without a limit.
    iterations
        Rounds of a search that a reading makes; None takes its own.
    seed
        Of such a search.
    advance
        Called with the share in [0, 1] that is done, and the share that is not found.
    """

    seconds: float | None = None
    iterations: int | None = None
    seed: int = 0
    advance: Callable[[float, float], None] = lambda _, __: None


class Reading(ABC):
    """Reads the inputs of a layer of a client's model off an update.

    Attributes
    ----------
    name
        Registered name of the attack that reads.
    drawn
        Whether a search decides what is read, so that each restart reads anew, under its own seed
        and in its share of the time; else restarts of one observation share a reading.
    """

    name: ClassVar[str]
    drawn: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, case: Case) -> Case:
        """Return a case as it is read.

        Raises
        ------
        BractError
            If the model, the evidence or the number of examples leaves nothing to read.
        """

    @abstractmethod
    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        """Return what entered, of a case that `prepare` returned.

        Raises
        ------
        BractError
            If the update does not determine it, or no time was left.
        """

    def read(self, case: Case, budget: ReadingBudget | None = None) -> Entered | Refusal:
        """Return what entered, or why it is not read, of any case."""
        try:
            return self.entered(self.prepare(case), budget or ReadingBudget())
        except OF_ONE_CASE as error:
            return refusal(self.name, case.observation, error)

    def read_each(self, problem: Problem, run: Run) -> Iterator[Entered | Refusal]:
        """Yield what entered in each trial, of cases that `prepare` returned."""
        begun, read = clock.now(), dict[tuple[int, int | None], Entered | Refusal]()
        for trial, case in enumerate(problem.cases):
            key = (id(case.observation), problem.seeds[trial] if self.drawn else None)
            if key not in read:
                budget = self._budget(problem, trial, run, clock.now() - begun)
                try:
                    read[key] = self.entered(case, budget)
                except OF_ONE_CASE as error:
                    read[key] = refusal(self.name, case.observation, error)
            yield read[key]

    def _budget(self, problem: Problem, trial: int, run: Run, spent: float) -> ReadingBudget:
        seconds, trials = run.seconds, problem.trials

        def advance(done: float, left: float) -> None:
            run.advance((trial + done) / trials, left)

        if self.drawn:
            each = None if seconds is None else seconds / trials
            seed = problem.seeds[trial]
        else:
            each = None if seconds is None else max(0.0, seconds - spent)
            seed = trial_seed(problem.seed, problem.cases[trial].observation.key, 0)
        return ReadingBudget(seconds=each, iterations=run.iterations, seed=seed, advance=advance)


class Inverse(ABC):
    """Examples from what entered a layer."""

    @abstractmethod
    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Find examples that make this enter, one reading a trial."""
