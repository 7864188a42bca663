"""The strongest attack on an upload, found by letting several compete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from bract.attacks.base import Attacker
from bract.attacks.methods.portfolio.halving import Configuration, Contest, Tournament
from bract.attacks.methods.portfolio.reading_off import is_read_off
from bract.attacks.problem.case import Case
from bract.attacks.registry import ATTACKS, attack, closed_forms
from bract.attacks.result import Budget, CutOffError, Reconstruction, Refusal
from bract.attacks.task import AttackTask
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.installed.plugins import elsewhere


@ATTACKS.register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Attacker):
    """The strongest of several attacks, found for each observation without the truth.

    1. The labels are read.
    2. Closed forms are tried, the cheapest first. An observation whose match reaches the rounding
       of the captured numbers is done, and so is one that `Best` would keep.
    3. Every attack of the pool from every start is a configuration of successive halving
       (Jamieson and Talwalkar 2016, algorithm 1): with n configurations there are ``ceil(log2 n) +
       1`` passes, each of which keeps half of the configurations and gives them twice the
       iterations. The last pass gives one configuration the whole budget, so the choice costs about
       as many full attacks as there are passes. Passes start afresh, since the schedules of most
       attacks depend on where they end.

    See `Contest` for how configurations are compared. Every trial stays in the result, so the
    *oracle* pick shows what a better choice would have got.

    A budget in iterations is that of the last pass; one in seconds is shared by all passes.

    Attributes
    ----------
    pool
        Names of the attacks that compete; None takes those that suit a case
        (`Attacker.suits`), such as the attack on heads where the backbone is frozen.
    """

    name: ClassVar[str] = "auto"
    title: ClassVar[str] = "Auto"
    inputs: ClassVar[tuple[str, ...]] = ("image", "table", "text", "signal")
    portfolio: ClassVar[bool] = True

    pool: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.pool or ():
            if name in elsewhere("bract.attacks") and name not in ATTACKS:
                raise ATTACKS.missing(name)
            if name == self.name or name not in ATTACKS:
                raise BractError(
                    f"auto cannot choose {name!r}; give names of other attacks", code="config-value"
                )

    def prior(self) -> Attacker | None:
        """Return that of the first attack in the pool that has one."""
        priors = (attack(name).prior() for name in self.pool or _competing())
        return next((found for found in priors if found is not None), None)

    def needs(self, observation: Observation) -> frozenset[str] | None:
        """Return what those of the pool read that handle the input, together."""
        kind = observation.declaration.input
        pool = self.pool or _competing()
        own = [attack(n).needs(observation) for n in pool if kind in ATTACKS[n].inputs]
        named = [names for names in own if names is not None]
        return frozenset().union(*named) if named and len(named) == len(own) else None

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack each case with what suits it best; configurations of one kind run as one batch."""
        by_input: dict[str, list[int]] = {}
        for place, case in enumerate(cases):
            by_input.setdefault(case.observation.declaration.input, []).append(place)
        found: dict[int, Reconstruction | Refusal] = {}
        for kind, places in by_input.items():
            try:
                results = self._run_alike([cases[place] for place in places], task, kind)
            except CutOffError as cut:
                cut.found += [one for one in found.values() if isinstance(one, Reconstruction)]
                raise
            found |= dict(zip(places, results, strict=True))
        return [found[place] for place in range(len(cases))]

    def _run_alike(
        self, cases: Sequence[Case], task: AttackTask, kind: str
    ) -> list[Reconstruction | Refusal]:
        """Attack cases of one input with those of the pool that handle it."""
        starts = task.budget.restart_numbers
        pools = [self._suiting(case, kind) for case in cases]
        if not all(pools):
            reason = f"no attack of auto's pool handles the input {kind}"
            return [
                Refusal(attack=self.name, observation=c.observation.key, reason=reason)
                for c in cases
            ]
        contests = [
            Contest(
                [Configuration(name, start) for name in pool for start in starts],
                is_smooth=partial(_is_smooth, case),
            )
            for case, pool in zip(cases, pools, strict=True)
        ]
        tournament = Tournament(cases, contests, task)
        labels = tournament.attempt(_label_reader(), range(len(cases)), Budget())
        try:
            self._compete(cases, contests, tournament, kind)
        except CutOffError as cut:
            tournament.keep_found(cut.found)
            results = self._results(cases, contests, labels, task)
            cut.found = [one for one in results if isinstance(one, Reconstruction)]
            raise
        return self._results(cases, contests, labels, task)

    def _suiting(self, case: Case, kind: str) -> list[str]:
        """Return the attacks that compete for a case."""
        names = [name for name in self.pool or ATTACKS if kind in ATTACKS[name].inputs]
        if self.pool is not None:
            return names
        return [name for name in names if attack(name).suits(case)]

    def _compete(
        self,
        cases: Sequence[Case],
        contests: Sequence[Contest],
        tournament: Tournament,
        kind: str,
    ) -> None:
        """Try closed forms, and let the configurations of all contests play their passes."""
        counts = [len(contest.configurations) for contest in contests]
        for name in (form for form in closed_forms() if kind in ATTACKS[form].inputs):
            tournament.try_closed_form(name)
        for case, contest in zip(cases, contests, strict=True):
            contest.read_off = is_read_off(case, contest.trials)
        passes = math.ceil(math.log2(max(counts, default=1))) + 1
        for number in range(1, passes + 1):
            for contest, count in zip(contests, counts, strict=True):
                contest.halve(math.ceil(count / 2 ** (number - 1)))
            tournament.play(number, passes)
        if not any(contest.configurations for contest in contests):
            tournament.report_done()

    def _results(
        self,
        cases: Sequence[Case],
        contests: Sequence[Contest],
        labels: Sequence[Reconstruction | Refusal],
        task: AttackTask,
    ) -> list[Reconstruction | Refusal]:
        return [
            self._result(case, contest, read, task)
            for case, contest, read in zip(cases, contests, labels, strict=True)
        ]

    def _result(
        self, case: Case, contest: Contest, labels: Reconstruction | Refusal, task: AttackTask
    ) -> Reconstruction | Refusal:
        key = case.observation.key
        if not contest.trials:
            reasons = dict.fromkeys(
                contest.reasons[name]
                for name in self.pool or ATTACKS
                if name in contest.reasons and (self.pool or not ATTACKS[name].closed_form)
            )
            # Of closed forms alone their own reasons are all there are.
            known = reasons or dict.fromkeys(contest.reasons.values())
            reason = "; ".join(known) or f"no attack of auto's pool can use {key}"
            return Refusal(attack=self.name, observation=key, reason=reason)
        chosen = contest.best()
        read = labels.labels.tolist() if isinstance(labels, Reconstruction) else None
        decided: dict[str, Any] = {"criterion": contest.criterion, "labels_read": read}
        return Reconstruction(
            attack=self.name,
            observation=key,
            tier=task.tier,
            seed=task.seed,
            trials=tuple(contest.trials),
            chosen=chosen,
            seconds=case.seconds + sum(trial.seconds for trial in contest.trials),
            not_applicable=dict(contest.reasons),
            settings=contest.trials[chosen].settings | decided,
        )


def _is_smooth(case: Case) -> bool:
    return case.target_model.traits.smooth


def _competing() -> tuple[str, ...]:
    return tuple(name for name in ATTACKS if ATTACKS[name].competes)


def _label_reader() -> Attacker:
    """Return the attack that reads labels and no image."""
    return next(attack(name) for name in ATTACKS if ATTACKS[name].labels_only)
