"""Choose attack and restart blind: try each briefly, continue those with the lowest loss."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from bract.attacks.base import Attacker
from bract.attacks.methods.best import explains
from bract.attacks.methods.r_gap import RGAP
from bract.attacks.problem.case import Case
from bract.attacks.registry import ATTACKS, attack
from bract.attacks.result import Budget, Reconstruction, Refusal, Trial
from bract.attacks.solve.levenberg_marquardt import SOLVED
from bract.attacks.task import AttackTask
from bract.errors import BractError

_CLOSED_FORMS = 0.2
"""Most of a budget in seconds that each closed form may take; `spear` searches in its own,
and `r-gap` makes further passes."""

COSINE = "cosine between the tier's evidence and what the images would have caused"
WITH_STATISTICS = f"{COSINE}; and the relative error of the batch statistics"
POSTERIOR = "posterior: the evidence's likelihood and a prior of natural images, in nats"


class Configuration(NamedTuple):
    """One attack and one of its restarts."""

    attack: str
    restart: int


@dataclass
class _Search:
    """Results on one observation so far."""

    configurations: list[Configuration]
    trials: list[Trial] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    read_off: bool = False

    def drop(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        self.configurations = [
            configuration for configuration in self.configurations if configuration.attack != name
        ]

    def halve(self, keep: int) -> None:
        """Keep the configurations that matched best in their last pass; none where one has solved
        it."""
        if self.solved:
            self.configurations = []
        last = {Configuration(t.attack, t.restart): self._value(t) for t in self.trials}
        self.configurations = sorted(
            self.configurations, key=lambda configuration: last.get(configuration, math.inf)
        )[:keep]

    @property
    def solved(self) -> bool:
        """Whether a match reaches the rounding of the captured numbers, or `best` would keep what
        was read off."""
        matches = [trial.residual for trial in self.trials if trial.residual is not None]
        return self.read_off or any(residual**2 < SOLVED for residual in matches)

    def best(self) -> int:
        """Index of the trial that matches best."""
        return min(range(len(self.trials)), key=lambda index: self._value(self.trials[index]))

    @property
    def by_posterior(self) -> bool:
        """Whether trials are compared by their posterior: all have one, and nothing better."""
        done = [trial for trial in self.trials if not trial.failed]
        return bool(done) and all(t.nats is not None and t.statistics is None for t in done)

    def _value(self, trial: Trial) -> float:
        """What configurations are compared by; less is better."""
        if not self.by_posterior:
            return trial.distance + (trial.statistics or 0.0)
        if trial.failed or trial.nats is None or not math.isfinite(trial.nats):
            return math.inf
        return trial.nats


@ATTACKS.register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Attacker):
    """The strongest of several attacks, found for each observation without the truth.

    Closed forms go first: the labels, the exact input where a fully connected layer sees it, a
    batch's where a ReLU follows that layer, and a single image through a chain of layers.
    Then every attack of the pool from every start is a configuration of successive halving
    (Jamieson and Talwalkar 2016, algorithm 1): with n configurations there are ``ceil(log2 n) +
    1`` passes, each of which keeps half of the configurations and gives them twice the iterations.
    The last pass gives one configuration the whole budget, so the choice costs about as many full
    attacks as there are passes. Passes start afresh, since the schedules of most attacks depend on
    where they end. An observation whose match reaches the rounding of the captured numbers is done,
    and so is one that `RGAP` explains as well as `best` asks for.

    Configurations are compared by what the attacker maximises who knows the defense. Where the
    evidence of the tier has a likelihood (noise, alone or after pruning) that is the posterior,
    `Trial.nats`: an image that fits the noise has a better cosine than the likeliest one.
    Elsewhere it is the cosine of the match to the evidence, which all attacks share and which is
    free of each attack's own loss, prior and scale; readings that the evidence leaves open (pruned
    coordinates, those that a defense made ambiguous) are taken in the candidate's favour. Where
    the capture holds the statistics of the client's own batch, their relative error is added. Every
    trial stays in the result, so the *oracle* pick says what a better choice would have got.

    A budget in iterations is that of the last pass; one in seconds is shared by all passes.

    Attributes
    ----------
    pool
        Names of the attacks that compete.
    """

    name: ClassVar[str] = "auto"

    pool: tuple[str, ...] = ("best", "ig")

    def __post_init__(self) -> None:
        for name in self.pool:
            if name == self.name or name not in ATTACKS:
                raise BractError(f"auto cannot choose {name!r}; give names of other attacks")

    def prior(self) -> Attacker | None:
        """That of the first attack in the pool that has one."""
        priors = (attack(name).prior() for name in self.pool)
        return next((found for found in priors if found is not None), None)

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack each case with what suits it best; configurations of one kind run as one batch."""
        tournament = _Tournament(cases, task)
        configurations = [
            Configuration(name, start)
            for name in self.pool
            for start in task.budget.restart_numbers
        ]
        searches = [_Search(list(configurations)) for _ in cases]
        known = tournament.attempt("labels", range(len(cases)), Budget())
        for closed_form in ("analytic", "spear", "r-gap"):
            tournament.play(searches, {(closed_form, (0,), 1): _open(searches)}, None, 0)
        for case, search in zip(cases, searches, strict=True):
            search.read_off = any(
                trial.attack == RGAP.name and explains(trial.loss, case.target_model)
                for trial in search.trials
            )
        passes = math.ceil(math.log2(len(configurations))) + 1
        for number in range(1, passes + 1):
            keep = math.ceil(len(configurations) / 2 ** (number - 1))
            for search in searches:
                search.halve(keep)
            share = 2.0 ** (number - passes)
            tournament.span = ((number - 1) / passes, number / passes)
            tournament.play(searches, _groups(searches), share, number, parts=passes)
        if not any(search.configurations for search in searches):
            tournament.tell_done(searches)
        return [
            self._result(case, search, labels, task)
            for case, search, labels in zip(cases, searches, known, strict=True)
        ]

    def _result(
        self, case: Case, search: _Search, labels: Reconstruction | Refusal, task: AttackTask
    ) -> Reconstruction | Refusal:
        key = case.observation.key
        if not search.trials:
            reasons = dict.fromkeys(search.reasons[name] for name in self.pool)
            return Refusal(attack=self.name, observation=key, reason="; ".join(reasons))
        chosen = search.best()
        read = labels.labels.tolist() if isinstance(labels, Reconstruction) else None
        known = search.trials[chosen].statistics is not None
        criterion = POSTERIOR if search.by_posterior else WITH_STATISTICS if known else COSINE
        decided: dict[str, Any] = {"criterion": criterion, "labels_read": read}
        return Reconstruction(
            attack=self.name,
            observation=key,
            tier=task.tier,
            seed=task.seed,
            trials=tuple(search.trials),
            chosen=chosen,
            seconds=case.seconds + sum(trial.seconds for trial in search.trials),
            not_applicable=dict(search.reasons),
            settings=search.trials[chosen].settings | decided,
        )


_Group = tuple[str, tuple[int, ...], int]
"""An attack, its starts, and how many configurations share the pass."""


def _open(searches: Sequence[_Search]) -> list[int]:
    """Return the observations that no trial has solved."""
    return [i for i, search in enumerate(searches) if not search.solved]


def _groups(searches: Sequence[_Search]) -> dict[_Group, list[int]]:
    """Gather observations whose configurations of one attack are the same: they run as one
    batch."""
    groups: dict[_Group, list[int]] = {}
    for index, search in enumerate(searches):
        for name in dict.fromkeys(configuration.attack for configuration in search.configurations):
            starts = tuple(
                sorted(
                    configuration.restart
                    for configuration in search.configurations
                    if configuration.attack == name
                )
            )
            groups.setdefault((name, starts, len(search.configurations)), []).append(index)
    return groups


class _Tournament:
    """One call of `Auto.run`: its cases, and how far it is."""

    def __init__(self, cases: Sequence[Case], task: AttackTask) -> None:
        self.cases = cases
        self.task = task
        self.span = (0.0, 0.0)
        self._begun = time.perf_counter()

    def attempt(
        self, name: str, members: Sequence[int], budget: Budget
    ) -> list[Reconstruction | Refusal]:
        """Run one attack on some of the cases."""
        budget = replace(budget, max_images=self.task.budget.max_images)
        engine = self.task.engine.within(*self.span, self._begun)
        task = replace(self.task, budget=budget, engine=engine)
        # What `best` would read off has been tried.
        settings = {"closed_form": False} if name == "best" else {}
        return attack(name, **settings).run([self.cases[i] for i in members], task)

    def play(
        self,
        searches: Sequence[_Search],
        groups: dict[_Group, list[int]],
        share: float | None,
        number: int,
        *,
        parts: int = 1,
    ) -> None:
        """Give every group its share of the budget, and keep what came back."""
        low, high = self.span
        for position, ((name, starts, configurations), members) in enumerate(groups.items()):
            step = (high - low) / len(groups)
            self.span = (low + position * step, low + (position + 1) * step)
            most = self.task.budget.seconds
            budget = Budget(
                chosen_restarts=starts, seconds=None if most is None else _CLOSED_FORMS * most
            )
            if share is not None:
                budget = self._part(name, starts, share, len(starts) / (parts * configurations))
            results = self.attempt(name, members, budget)
            for index, result in zip(members, results, strict=True):
                if isinstance(result, Refusal):
                    searches[index].drop(name, result.reason)
                    continue
                searches[index].trials += [
                    replace(trial, pass_number=number) for trial in result.trials
                ]

    def tell_done(self, searches: Sequence[_Search]) -> None:
        """Report the end where the last pass had nothing left to do."""
        losses = [trial.loss for search in searches for trial in search.trials]
        self.task.engine.tell_done(self._begun, min(losses, default=0.0))

    def _part(self, name: str, starts: tuple[int, ...], share: float, time_share: float) -> Budget:
        iterations, seconds = self.task.budget.iterations, self.task.budget.seconds
        if iterations is None and seconds is None:
            iterations = ATTACKS[name].iterations
        return Budget(
            iterations=None if iterations is None else max(1, round(iterations * share)),
            seconds=None if seconds is None else seconds * time_share,
            chosen_restarts=starts,
        )
