"""Successive halving over attacks and their starts, without the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bract.attacks.base import Attacker
from bract.attacks.methods.portfolio.ranking import is_read
from bract.attacks.problem.case import Case
from bract.attacks.registry import ATTACKS, attack
from bract.attacks.result import Budget, Reconstruction, Refusal, Trial
from bract.attacks.solve.levenberg_marquardt import SOLVED
from bract.attacks.task import AttackTask
from bract.process import clock

CLOSED_FORM_SHARE = 0.2
"""Most of a budget in seconds that each closed form may take: some search or iterate."""

COSINE = "cosine between the tier's evidence and what the images would have caused"
WITH_STATISTICS = f"{COSINE}; and the relative error of the batch statistics"
READ = "certificate of what was read of a layer, and the distance from those activations"
POSTERIOR = "posterior: the evidence's likelihood and a prior of natural images, in nats"


EXPLAINS = 0.05
"""One minus the cosine below which images explain the rounds that they are fitted to. Chosen on
images that no benchmark scores: of three rounds of the same four images 0.005 to 0.02 is left after
a part of the iterations, of rounds of four out of eight 0.1 to 0.4."""


_EXACT, _READ, _MATCHED = 0.0, 1.0, 2.0
"""Order of trials that match to rounding, of those found from what was read, and of the others."""

_LAST = (math.inf,)


class Configuration(NamedTuple):
    """One attack and one of its restarts."""

    attack: str
    restart: int


@dataclass
class Contest:
    """Configurations and results on one observation so far.

    Configurations are compared by what an attacker that knows the defense maximises. Where the
    evidence of the tier has a likelihood (noise, alone or after pruning) that is the posterior,
    `Trial.nats`: an image that fits the noise has a better cosine than the likeliest one. Elsewhere
    it is the cosine of the match to the evidence, which all attacks share and which is free of each
    attack's own loss, prior and scale; readings that the evidence leaves open (pruned coordinates,
    those that a defense made ambiguous) are taken in the candidate's favour. Where the capture
    holds the statistics of the client's own batch, their relative error is added. Trials whose
    images come near what the update determines of a layer (`ranking.is_read`) come before all
    others that are not exact, the better determined first as in `best`, then by their own loss:
    through a fresh ResNet-20 in training mode an image at 30 dB has hardly a better cosine than
    another client's (`experiments.needle`). Among exact ones they come first too.

    Attributes
    ----------
    is_smooth
        Returns whether the model is; called once something was read, so of a model that can run.
    reasons
        Why attacks cannot be used, by name.
    read_off
        Whether a closed form explains the observation.
    """

    configurations: list[Configuration]
    trials: list[Trial] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    read_off: bool = False
    is_smooth: Callable[[], bool] = lambda: False

    def drop(self, name: str, reason: str) -> None:
        """Leave an attack out."""
        self.reasons[name] = reason
        self.configurations = [
            configuration for configuration in self.configurations if configuration.attack != name
        ]

    def halve(self, keep: int) -> None:
        """Keep the configurations that matched best in their last pass; none if it is solved.

        Looser attacks take no other's place, and leave where another one explains the upload.
        """
        if self.solved:
            self.configurations = []
        last = {Configuration(t.attack, t.restart): self._rank(t) for t in self.trials}
        ordered = sorted(self.configurations, key=lambda own: last.get(own, _LAST))
        looser = [one for one in ordered if _is_looser(one.attack)]
        others = [one for one in ordered if not _is_looser(one.attack)]
        self.configurations = others[:keep] + ([] if self._explained else looser[:keep])

    @property
    def solved(self) -> bool:
        """Return whether a match reaches the rounding of the captured numbers, or was read off."""
        return self.read_off or any(_is_exact(trial) for trial in self.trials)

    def best(self) -> int:
        """Index of the trial that matches best."""
        return min(range(len(self.trials)), key=lambda index: self._rank(self.trials[index]))

    @property
    def _explained(self) -> bool:
        """Return whether an attack explains the upload that may explain no more than it holds."""
        return any(t.distance < EXPLAINS and not _is_looser(t.attack) for t in self.trials)

    @property
    def criterion(self) -> str:
        """Return what the best trial was chosen by, in words."""
        if self._by_posterior:
            return POSTERIOR
        if self._is_read(self.trials[self.best()]):
            return READ
        return COSINE if self.trials[self.best()].statistics is None else WITH_STATISTICS

    @property
    def _by_posterior(self) -> bool:
        done = [trial for trial in self.trials if not trial.failed]
        return bool(done) and all(t.nats is not None and t.statistics is None for t in done)

    def _rank(self, trial: Trial) -> tuple[float, ...]:
        """Return what sorts the better of two trials first."""
        if _is_looser(trial.attack) and self._explained:
            return _LAST
        if self._by_posterior:
            found = trial.nats is not None and math.isfinite(trial.nats) and not trial.failed
            return (0.0, trial.nats) if found and trial.nats is not None else _LAST
        if not self._is_read(trial):
            if _is_exact(trial):
                return _EXACT, 0.0, trial.distance
            return _MATCHED, 0.0, trial.distance + (trial.statistics or 0.0)
        assert trial.determined is not None
        equations = float(trial.determined.equations)
        if _is_exact(trial):
            return _EXACT, -equations, trial.distance
        return _READ, -equations, trial.loss

    def _is_read(self, trial: Trial) -> bool:
        return is_read(trial.method, trial.loss, trial.determined, smooth=self.is_smooth())


def _is_looser(name: str) -> bool:
    return name in ATTACKS and ATTACKS[name].looser


def _is_exact(trial: Trial) -> bool:
    return trial.residual is not None and trial.residual**2 < SOLVED


class Tournament:
    """Contests on several cases, their budget and their progress."""

    def __init__(
        self, cases: Sequence[Case], contests: Sequence[Contest], task: AttackTask
    ) -> None:
        self._cases = cases
        self._contests = contests
        self._task = task
        self._begun = clock.now()

    def try_closed_form(self, name: str) -> None:
        """Run a closed form on the observations that no trial has solved."""
        open_ = [i for i, contest in enumerate(self._contests) if not contest.solved]
        most = self._task.budget.seconds
        seconds = None if most is None else CLOSED_FORM_SHARE * most
        budget = Budget(chosen_restarts=(0,), seconds=seconds)
        self._keep(open_, self.attempt(attack(name), open_, budget), 0)

    def play(self, number: int, passes: int) -> None:
        """Run a pass; observations with the same starts of an attack run as one batch."""
        groups = self._groups()
        share = 2.0 ** (number - passes)
        width = 1.0 / (passes * max(1, len(groups)))
        low = (number - 1) / passes
        for (name, starts, configurations), members in groups.items():
            budget = self._budget(name, starts, share, len(starts) / (passes * configurations))
            method = attack(name).after_closed_forms()
            self._keep(members, self.attempt(method, members, budget, (low, low + width)), number)
            low += width

    def attempt(
        self,
        method: Attacker,
        members: Sequence[int],
        budget: Budget,
        span: tuple[float, float] = (0.0, 0.0),
    ) -> list[Reconstruction | Refusal]:
        """Run one attack on some of the cases; ``span`` is its part of the progress."""
        budget = replace(budget, max_images=self._task.budget.max_images)
        engine = self._task.engine.within(*span, self._begun)
        task = replace(self._task, budget=budget, engine=engine)
        return method.run([self._cases[i] for i in members], task)

    def report_done(self) -> None:
        """Report the end where the last pass had nothing left to do."""
        losses = [trial.loss for contest in self._contests for trial in contest.trials]
        self._task.engine.report_done(self._begun, min(losses, default=0.0))

    def keep_found(self, found: Sequence[Reconstruction]) -> None:
        """Keep what an attack had found that was cut off."""
        places = {case.observation.key: i for i, case in enumerate(self._cases)}
        for one in found:
            self._contests[places[one.observation]].trials += one.trials

    def _keep(
        self, members: Sequence[int], results: Sequence[Reconstruction | Refusal], number: int
    ) -> None:
        for index, result in zip(members, results, strict=True):
            if isinstance(result, Refusal):
                self._contests[index].drop(result.attack, result.reason)
                continue
            trials = [replace(trial, pass_number=number) for trial in result.trials]
            self._contests[index].trials += trials

    def _groups(self) -> dict[tuple[str, tuple[int, ...], int], list[int]]:
        """Gather observations by attack, its starts, and how many configurations share the pass."""
        groups: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
        for index, contest in enumerate(self._contests):
            starts: dict[str, list[int]] = {}
            for configuration in contest.configurations:
                starts.setdefault(configuration.attack, []).append(configuration.restart)
            for name, own in starts.items():
                key = (name, tuple(sorted(own)), len(contest.configurations))
                groups.setdefault(key, []).append(index)
        return groups

    def _budget(
        self, name: str, starts: tuple[int, ...], share: float, time_share: float
    ) -> Budget:
        iterations, seconds = self._task.budget.iterations, self._task.budget.seconds
        if iterations is None and seconds is None:
            iterations = ATTACKS[name].iterations
        return Budget(
            iterations=None if iterations is None else max(1, round(iterations * share)),
            seconds=None if seconds is None else seconds * time_share,
            chosen_restarts=starts,
        )
