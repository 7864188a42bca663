"""Which attack from which start: tried briefly, continued where it pays, chosen blind."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from bract.attacks.engine import Engine, Progress
from bract.attacks.evidence import Tier, remembered_evidence
from bract.attacks.levenberg import SOLVED
from bract.attacks.matching import Attacker, History
from bract.attacks.reconstruction import Budget, Reconstruction, Refusal, Restart
from bract.attacks.registry import ATTACKS, attack
from bract.errors import BractError
from bract.observation import Observation

CRITERION = "cosine between the tier's evidence and what the images would have caused"


class Arm(NamedTuple):
    """One attack from one of its starts."""

    attack: str
    start: int


@dataclass(frozen=True)
class Trial:
    """One pass of one arm over one observation."""

    arm: Arm
    restart: Restart
    settings: dict[str, Any]
    number: int

    @property
    def distance(self) -> float:
        """One minus the cosine of the match, in [0, 2]; infinite for a failed trial."""
        cosine = self.restart.cosine
        if cosine is None or not math.isfinite(cosine) or not math.isfinite(self.restart.loss):
            return math.inf
        return 1.0 - cosine

    @property
    def solved(self) -> bool:
        """Whether the match reaches the rounding of the captured numbers."""
        residual = self.restart.residual
        return residual is not None and residual**2 < SOLVED

    def summary(self) -> dict[str, Any]:
        """What the attacker saw of it, JSON-ready."""
        loss = self.restart.loss
        return {
            "attack": self.arm.attack,
            "start": self.arm.start,
            "pass": self.number,
            "iterations": self.restart.iterations,
            "distance": self.distance if math.isfinite(self.distance) else None,
            "loss": loss if math.isfinite(loss) else None,
            "seconds": self.restart.seconds,
        }


@dataclass
class _Search:
    """What is known about one observation so far."""

    arms: list[Arm]
    trials: list[Trial] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        self.arms = [arm for arm in self.arms if arm.attack != name]

    def halve(self, keep: int) -> None:
        """Keep the arms that matched best in their last pass; none where one has solved it."""
        if any(trial.solved for trial in self.trials):
            self.arms = []
        last = {trial.arm: trial.distance for trial in self.trials}
        self.arms = sorted(self.arms, key=lambda arm: last.get(arm, math.inf))[:keep]

    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.distance)


@ATTACKS.register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Attacker):
    """The strongest of several attacks, found for each observation without the truth.

    Closed forms go first: the labels, and the exact input where a fully connected layer sees it.
    Then every attack of the pool from every start is an arm of successive halving (Jamieson and
    Talwalkar 2016, algorithm 1): with n arms there are ``ceil(log2 n) + 1`` passes, each of which
    keeps half of the arms and gives them twice the iterations. The last pass gives one arm the
    whole budget, so the choice costs about as many full attacks as there are passes. Passes start
    afresh, since the schedules of most attacks depend on where they end. An observation whose
    match reaches the rounding of the captured numbers is done.

    Arms are compared by the cosine of their match to the evidence of the tier, which all attacks
    share and which is free of each attack's own loss, prior and scale. Every trial stays in
    ``all_restarts``, so the *oracle* pick says what a better choice would have got.

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

    def run(
        self,
        observations: Sequence[Observation],
        *,
        budget: Budget,
        seed: int,
        tier: Tier,
        engine: Engine,
        history: History | None = None,
    ) -> list[Reconstruction | Refusal]:
        """Attack each observation with what suits it best; arms of one kind run as one batch."""
        with remembered_evidence():
            return self._run(_Call(observations, budget, seed, tier, engine, history))

    def _run(self, call: _Call) -> list[Reconstruction | Refusal]:
        observations, budget = call.observations, call.budget
        arms = [Arm(name, start) for name in self.pool for start in budget.chosen_starts]
        searches = [_Search(list(arms)) for _ in observations]
        known = call.attempt("labels", tuple(range(len(observations))), Budget())
        labels = [r.labels.tolist() if isinstance(r, Reconstruction) else None for r in known]
        call.pass_(searches, {("analytic", (0,), 1): list(range(len(observations)))}, None, 0)
        passes = math.ceil(math.log2(len(arms))) + 1
        for number in range(1, passes + 1):
            keep = math.ceil(len(arms) / 2 ** (number - 1))
            for search in searches:
                search.halve(keep)
            share = 2.0 ** (number - passes)
            call.span = ((number - 1) / passes, number / passes)
            call.pass_(searches, _groups(searches), share, number, parts=passes)
        return [
            self._result(call, search, index, labels[index])
            for index, search in enumerate(searches)
        ]

    def _result(
        self, call: _Call, search: _Search, index: int, labels: list[int] | None
    ) -> Reconstruction | Refusal:
        key = call.observations[index].key
        if not search.trials:
            reasons = dict.fromkeys(search.reasons[name] for name in self.pool)
            return Refusal(attack=self.name, observation=key, reason="; ".join(reasons))
        chosen = search.best()
        restart = chosen.restart
        settings = {
            "chosen": chosen.arm.attack,
            "criterion": CRITERION,
            "trials": [trial.summary() for trial in search.trials],
            "not_applicable": dict(search.reasons),
            "labels_read": labels,
        }
        return Reconstruction(
            attack=self.name,
            observation=key,
            tier=call.tier,
            seed=call.seed,
            images=restart.images,
            label_probabilities=restart.label_probabilities,
            final_loss=restart.loss,
            loss_curve=restart.loss_curve,
            seconds=sum(trial.restart.seconds for trial in search.trials),
            iterations=restart.iterations,
            all_restarts=[trial.restart for trial in search.trials],
            gradient_cosine=restart.cosine,
            gradient_residual=restart.residual,
            settings=chosen.settings | settings,
        )


_Group = tuple[str, tuple[int, ...], int]
"""An attack, its starts, and how many arms share the pass."""


def _groups(searches: Sequence[_Search]) -> dict[_Group, list[int]]:
    """Gather observations whose arms of one attack are the same: they run as one batch."""
    groups: dict[_Group, list[int]] = {}
    for index, search in enumerate(searches):
        for name in dict.fromkeys(arm.attack for arm in search.arms):
            starts = tuple(sorted(arm.start for arm in search.arms if arm.attack == name))
            groups.setdefault((name, starts, len(search.arms)), []).append(index)
    return groups


def _asked_once(history: History) -> History:
    """Return the same earlier observations whenever they are asked for again."""
    known: dict[int, tuple[Observation, Sequence[Observation]]] = {}

    def asked(observation: Observation) -> Sequence[Observation]:
        if id(observation) not in known:
            known[id(observation)] = observation, history(observation)
        return known[id(observation)][1]

    return asked


class _Call:
    """One call of `Auto.run`: what was asked for, and how far it is."""

    def __init__(
        self,
        observations: Sequence[Observation],
        budget: Budget,
        seed: int,
        tier: Tier,
        engine: Engine,
        history: History | None,
    ) -> None:
        self.observations = observations
        self.budget = budget
        self.seed = seed
        self.tier = tier
        self.engine = engine
        self.history = None if history is None else _asked_once(history)
        self.span = (0.0, 0.0)
        self._begun = time.perf_counter()

    def attempt(
        self, name: str, members: Sequence[int], budget: Budget
    ) -> list[Reconstruction | Refusal]:
        return attack(name).run(
            [self.observations[i] for i in members],
            budget=replace(budget, max_images=self.budget.max_images),
            seed=self.seed,
            tier=self.tier,
            engine=self.engine if self.engine.progress is None else self._reporting(),
            history=self.history,
        )

    def pass_(
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
        for position, ((name, starts, arms), members) in enumerate(groups.items()):
            step = (high - low) / len(groups)
            self.span = (low + position * step, low + (position + 1) * step)
            budget = Budget(starts=starts)
            if share is not None:
                budget = self._part(name, starts, share, len(starts) / (parts * arms))
            results = self.attempt(name, members, budget)
            for index, result in zip(members, results, strict=True):
                if isinstance(result, Refusal):
                    searches[index].drop(name, result.reason)
                    continue
                searches[index].trials += [
                    Trial(Arm(name, r.number), r, result.settings | {"restart": r.number}, number)
                    for r in result.all_restarts
                ]

    def _part(self, name: str, starts: tuple[int, ...], share: float, time_share: float) -> Budget:
        iterations, seconds = self.budget.iterations, self.budget.seconds
        if iterations is None and seconds is None:
            iterations = ATTACKS[name].iterations
        return Budget(
            iterations=None if iterations is None else max(1, round(iterations * share)),
            seconds=None if seconds is None else seconds * time_share,
            starts=starts,
        )

    def _reporting(self) -> Engine:
        low, high = self.span
        callback = self.engine.progress
        assert callback is not None

        def report(progress: Progress) -> None:
            fraction = low + (high - low) * progress.fraction
            seconds = time.perf_counter() - self._begun
            left = seconds * (1 - fraction) / fraction if fraction > 0 else math.inf
            callback(Progress(fraction, seconds, left, progress.loss))

        return replace(self.engine, progress=report)
