"""Base classes of attacks: group observations, run them, choose blindly among restarts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

import torch

from bract.attacks.options import Count, check_settings
from bract.attacks.problem.case import UNROLL, Case
from bract.attacks.problem.model_traits import ModelTraits
from bract.attacks.problem.objectives import NoObjective
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.public_prior import PublicPrior
from bract.attacks.result import Budget, CutOffError, Reconstruction, Refusal, Trial
from bract.attacks.solve.defaults import ModelDefault
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.engine import Engine, Progress
from bract.attacks.solve.start_search import from_best_start
from bract.attacks.stage import Stage
from bract.attacks.task import OF_ONE_CASE, AttackTask, open_cases, refusal
from bract.captures.observation import Observation
from bract.config.audit import TIERS, Tier
from bract.errors import BractError
from bract.installed.plugins import blaming

Batches = Literal["one", "few", "any"]
"""Images of one update that an attack reconstructs: a single one, at most `Budget.max_images`, or
as many as the update holds."""

Cost = Literal["instant", "seconds", "tens of seconds"]
"""Order of magnitude of one restart with the attack's own budget: an image of 32 pixels, a strided
LeNet, one CPU core."""

SECONDS: dict[str, float] = {"instant": 0.1, "seconds": 3.0, "tens of seconds": 30.0}
"""Seconds that each `Cost` stands for where work is ordered and divided."""


@dataclass(frozen=True, kw_only=True)
class Attacker(ABC):
    """Base of everything that runs on observations: one attack, or a choice among several.

    The class describes the attack; audit, report, command line and catalogue read it from here.

    Attributes
    ----------
    name
        Registered name.
    title
        Name on a page; empty takes ``name``.
    family
        Kind of attack, in words: the report lists families that were not tried. Empty for choices
        among attacks and for those that reconstruct no image.
    closed_form
        Whether images are computed rather than searched. `auto` tries closed forms first, and
        `best` those for one image.
    found_below
        Loss below which its images are taken for the client's; None takes that of the model
        (`bract.attacks.methods.portfolio.ranking.found`).
    nearer
        Loss below which images come before those that match better, since the update tells
        something else that they alone agree with; None where the match decides.
    batches
        Images that it reconstructs from one update.
    per_token
        Whether it handles a label for every token, as one an example.
    inputs
        Kinds of input that it reconstructs.
    tiers
        Tiers of knowledge that it serves; one for ``surrogate`` alone needs public images.
    generator
        Kind of the prior that it searches; None where it takes any, or none.
    cost
        Order of magnitude of one restart.
    competes
        Whether `auto` lets it compete by default.
    looser
        Whether it explains more than other attacks may, such as rounds by images of their own:
        `auto` takes it where none of the others explains the upload.
    stage
        Stage of `best` in which it takes part; None for one that takes none, and for closed forms
        and readings, which have theirs.
    labels_only
        Whether it reads labels and leaves examples grey.
    portfolio
        Whether it chooses among attacks itself.
    iterations
        Steps where the budget names none.
    defaults
        Values of settings that are None, by what the model is.
    """

    name: ClassVar[str] = "attacker"
    title: ClassVar[str] = ""
    family: ClassVar[str] = ""
    closed_form: ClassVar[bool] = False
    found_below: ClassVar[float | None] = None
    nearer: ClassVar[float | None] = None
    batches: ClassVar[Batches] = "few"
    inputs: ClassVar[tuple[str, ...]] = ("image",)
    per_token: ClassVar[bool] = False
    tiers: ClassVar[tuple[Tier, ...]] = TIERS
    generator: ClassVar[str | None] = None
    cost: ClassVar[Cost] = "tens of seconds"
    competes: ClassVar[bool] = False
    looser: ClassVar[bool] = False
    stage: ClassVar[Stage | None] = None
    labels_only: ClassVar[bool] = False
    portfolio: ClassVar[bool] = False
    iterations: ClassVar[int] = 1
    defaults: ClassVar[tuple[ModelDefault, ...]] = ()

    def __new__(cls, **settings: Any) -> Self:
        """Check the settings that are given, for every attack in this one place.

        Raises
        ------
        BractError
            If one is unknown, or is not what its field is annotated with.
        """
        check_settings(cls, settings)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # An attack that extends another one has not its title, and no part in a portfolio for it.
        for own in ("title", "competes", "stage"):
            if own not in vars(cls):
                setattr(cls, own, getattr(Attacker, own))

    def __call__(
        self,
        observation: Observation,
        *,
        budget: Budget | None = None,
        seed: int = 0,
        tier: Tier = "oblivious",
        device: str = "cpu",
        progress: Callable[[Progress], None] | None = None,
        history: Sequence[Observation] = (),
        public: PublicPrior | None = None,
    ) -> Reconstruction:
        """Attack one observation."""
        task = AttackTask(
            budget=budget or Budget(),
            seed=seed,
            tier=tier,
            engine=Engine(device=device, progress=progress),
            history=lambda _: history,
            public=public,
        )
        (result,) = self.attack([observation], task)
        if isinstance(result, Refusal):
            raise BractError(result.reason, code=result.code)
        return result

    def attack(
        self, observations: Sequence[Observation], task: AttackTask
    ) -> list[Reconstruction | Refusal]:
        """Open observations and attack them.

        Returns
        -------
        list
            One entry an observation, in order; one that cannot be attacked is a `Refusal` with
            its reason, and does not stop the others.
        """
        # A caller may have turned gradients off.
        with torch.inference_mode(mode=False):
            opened, left = open_cases(observations, task, attack=self.name, needs=self.needs)
            results = iter(self.run([case for case in opened if isinstance(case, Case)], left))
        return [next(results) if isinstance(case, Case) else case for case in opened]

    @abstractmethod
    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack cases that `open_cases` opened; one entry a case, in order, as `attack` does."""

    def suits(self, case: Case) -> bool:
        """Return whether `auto` lets the attack compete for a case by default.

        One that reads what most uploads do not hold says so here, by the case; the others by
        `competes`.
        """
        del case
        return type(self).competes

    def needs(self, observation: Observation) -> frozenset[str] | None:
        """Return the names of the parameters whose gradients it reads; None for all."""
        del observation
        return None

    def prior(self) -> Attacker | None:
        """The same attack with nothing to match, or None: its start and its prior make the image.

        No part of the client's update enters the image.
        """
        return None

    def after_closed_forms(self) -> Self:
        """Return the attack to run where closed forms have been tried."""
        return self

    def for_model(self, traits: ModelTraits) -> Self:
        """Return the attack with the model's defaults in place of settings that are None."""
        changes: dict[str, Any] = {
            default.setting: default.value
            for default in self.defaults
            if default.suits(traits) and getattr(self, default.setting) is None
        }
        return replace(self, **changes) if changes else self

    def settings(self) -> dict[str, Any]:
        """Hyper-parameters, JSON-ready."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Attack(Attacker):
    """A gradient inversion attack: hyper-parameters, and a call that runs it.

    Attributes
    ----------
    unroll
        Most local steps that are simulated one by one; longer training is matched by its mean
        gradient.
    relative
        Whether its losses are relative squared residuals of the update.
    coupled
        Whether the restarts of one observation see each other, and so run in one batch.
    """

    name: ClassVar[str] = "attack"
    relative: ClassVar[bool] = False
    coupled: ClassVar[bool] = False

    unroll: Count = UNROLL

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack many cases; those of one shape run as one batch on the device."""
        outcomes: dict[int, Reconstruction | Refusal] = {}
        groups: dict[Any, list[tuple[int, Case]]] = {}
        for index, given in enumerate(cases):
            try:
                with blaming(type(self)):
                    case = self.prepare(given)
            except OF_ONE_CASE as error:
                outcomes[index] = refusal(self.name, given.observation, error)
                continue
            groups.setdefault(case.shape, []).append((index, case))
        for group in groups.values():
            try:
                attempts = self._attempt([case for _, case in group], task)
            except CutOffError as cut:
                cut.found += [one for one in outcomes.values() if isinstance(one, Reconstruction)]
                raise
            for (index, _), outcome in zip(group, attempts, strict=True):
                outcomes[index] = outcome
        return [outcomes[i] for i in range(len(cases))]

    def prepare(self, case: Case) -> Case:
        """Return a case as this attack simulates it; one that needs more refuses it here."""
        self.require_model(case)
        return case.simulating(unroll=self.unroll)

    def require_model(self, case: Case) -> None:
        """Refuse a model without the layers that the attack needs, whatever is in the update.

        `bract.audit.handled.check_attacks` asks this of a made-up upload before a run.

        Raises
        ------
        BractError
            If every token has a label and the attack takes one an example.
        """
        if case.target_model.loss.per_token and not self.per_token:
            raise BractError(
                f"{case.observation.key}: {self.name} takes one label a text, the clients train on "
                "a label a token; attack with token-span, which reads tokens and their labels",
                code="attack-unsuited",
            )

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack as `best` runs it in its stage; None where it does not."""
        del problem
        return self

    @abstractmethod
    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Attack every trial within the limits of ``run``."""

    @property
    def matches(self) -> bool:
        """Return whether the attack matches anything, so that unknowns of the client can be
        judged.
        """
        return not isinstance(getattr(self, "objective", None), NoObjective)

    def prior(self) -> Attacker | None:
        """As `Attacker.prior`; an attack that only descends on an objective leaves that out.

        The statistics of the client's own batch, where an attack uses them, are left out too.
        """
        known = self.__dataclass_fields__
        if "objective" not in known:
            return None
        changes: dict[str, Any] = {"objective": NoObjective()}
        return replace(self, **changes | ({"bn": 0.0} if "bn" in known else {}))

    def _attempt(self, cases: list[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        solve = partial(_checked_outcome, self)
        try:
            with blaming(type(self)):
                solved = task.engine.run(
                    partial(from_best_start, solve) if self.matches else solve,
                    cases,
                    budget=task.budget,
                    default_iterations=self.iterations,
                    seed=task.seed,
                    identity=f"{self.name} {task.tier} {self!r}",
                    together=self.coupled,
                )
        except CutOffError as cut:
            cut.found += [
                self._choose(cases[number], trials, task, criterion=attrgetter("distance"))
                for number, trials in cut.trials.items()
            ]
            cut.trials = {}
            raise
        except OF_ONE_CASE as error:
            if len(cases) == 1:
                return [refusal(self.name, cases[0].observation, error)]
            return [result for case in cases for result in self._attempt([case], task)]
        return [
            self._choose(case, trials, task) for case, trials in zip(cases, solved, strict=True)
        ]

    def _choose(
        self,
        case: Case,
        trials: Sequence[Trial],
        task: AttackTask,
        *,
        criterion: Callable[[Trial], float] = attrgetter("loss"),
    ) -> Reconstruction:
        shared = self.for_model(case.target_model.traits).settings() | {
            "restarts": len(trials),
            "images": case.images,
            "forward": _plain(case.forward),
            "evidence": case.evidence.notes,
        }
        if case.public is not None:
            shared |= {"surrogate": case.public.text, "prior": case.public.record()}
        own = [
            replace(
                trial,
                attack=self.name,
                method=trial.method or self.name,
                unroll=self.unroll,
                settings=shared | {"restart": trial.restart},
            )
            for trial in trials
        ]
        best = min(range(len(own)), key=lambda i: criterion(own[i]))
        own[best] = _explained(case, own[best])
        return Reconstruction(
            attack=self.name,
            observation=case.observation.key,
            tier=task.tier,
            seed=task.seed,
            trials=tuple(own),
            chosen=best,
            seconds=case.seconds + sum(trial.seconds for trial in own),
            settings=own[best].settings,
        )


def _checked_outcome(attack: Attack, problem: Problem, run: Run) -> Outcome:
    # No method: one of the same name in an attack's class would replace it, or be replaced.
    found = attack.solve(problem, run)
    if not isinstance(found, Outcome):
        raise BractError(
            f"attack {attack.name}: solve returned a {type(found).__name__}, expected an Outcome",
            code="plugin-faulty",
        )
    return found.checked(problem)


def _explained(case: Case, trial: Trial) -> Trial:
    """Return the chosen trial with what the evidence reads of the model's inside."""
    explain, known = case.evidence.explain, case.evidence.buffers | trial.unknowns
    if explain is None or not known or trial.residual is None:
        return trial
    notes = case.evidence.notes | explain(known, trial.residual)
    return replace(trial, settings=trial.settings | {"evidence": notes})


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **inner}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return type(value).__name__
