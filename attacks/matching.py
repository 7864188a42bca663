"""What all attacks share: checking, grouping, running, and choosing blindly among restarts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bract.attacks.defaults import for_model
from bract.attacks.descent import Outcome, Run, descend
from bract.attacks.engine import Engine, Progress, Solved
from bract.attacks.evidence import Tier
from bract.attacks.labels import infer_labels
from bract.attacks.objectives import LayerWeighting, NoObjective, Objective, layer_weights
from bract.attacks.optimizers import LaneOptimizer
from bract.attacks.priors import Prior
from bract.attacks.problem import Case, Problem, open_case
from bract.attacks.reconstruction import Budget, Reconstruction, Refusal, Restart
from bract.errors import BractError
from bract.observation import Observation
from bract.update import Tensors

_OF_ONE_CASE = (BractError, RuntimeError, ValueError)
"""What the numbers of one observation can raise, `torch.linalg.LinAlgError` among them."""

History = Callable[[Observation], Sequence[Observation]]
"""Earlier observations of the same client, for adaptive attackers."""


@dataclass(frozen=True, kw_only=True)
class Attacker(ABC):
    """What can be run on observations: one attack, or a choice among several."""

    name: ClassVar[str] = "attacker"
    iterations: ClassVar[int] = 1

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
    ) -> Reconstruction:
        """Attack one observation.

        Raises
        ------
        BractError
            If the observation cannot be attacked; the message says why.
        """
        (result,) = self.run(
            [observation],
            budget=budget or Budget(),
            seed=seed,
            tier=tier,
            engine=Engine(device=device, progress=progress),
            history=lambda _: history,
        )
        if isinstance(result, Refusal):
            raise BractError(result.reason)
        return result

    @abstractmethod
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
        """Attack many observations.

        Returns
        -------
        list
            One entry an observation, in order; one that cannot be attacked is a `Refusal` with
            its reason, and does not stop the others.
        """

    def prior(self) -> Attacker | None:
        """The same attack with nothing to match, or None: its start and its prior make the image.

        Nothing that came back from the client enters the image.
        """
        return None

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
    """

    name: ClassVar[str] = "attack"

    unroll: int = 16

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
        """Attack many observations; those of one shape run as one batch on the device."""
        outcomes: dict[int, Reconstruction | Refusal] = {}
        groups: dict[Any, list[tuple[int, Case]]] = {}
        for index, observation in enumerate(observations):
            try:
                case = self.open(observation, budget, tier, history)
            except _OF_ONE_CASE as error:
                outcomes[index] = self._refuse(observation, error)
                continue
            groups.setdefault(case.shape, []).append((index, case))
        for group in groups.values():
            cases = [case for _, case in group]
            attempts = self._attempt(cases, budget, seed, tier, engine)
            for (index, _), outcome in zip(group, attempts, strict=True):
                outcomes[index] = outcome
        return [outcomes[i] for i in range(len(observations))]

    def _attempt(
        self, cases: list[Case], budget: Budget, seed: int, tier: Tier, engine: Engine
    ) -> list[Reconstruction | Refusal]:
        try:
            solved = engine.run(
                self.solve,
                cases,
                budget=budget,
                default_iterations=self.iterations,
                seed=seed,
                identity=f"{self.name} {tier} {self!r}",
            )
        except _OF_ONE_CASE as error:
            if len(cases) == 1:
                return [self._refuse(cases[0].observation, error)]
            return [r for c in cases for r in self._attempt([c], budget, seed, tier, engine)]
        return [
            self._choose(case, restarts, budget, seed, tier)
            for case, restarts in zip(cases, solved, strict=True)
        ]

    def _refuse(self, observation: Observation, error: Exception) -> Refusal:
        reason = str(error)
        if not isinstance(error, BractError):
            reason = (
                f"{observation.key}: {self.name} broke off on these tensors "
                f"({type(error).__name__}: {reason}); try another attack"
            )
        return Refusal(attack=self.name, observation=observation.key, reason=reason)

    def open(
        self, observation: Observation, budget: Budget, tier: Tier, history: History | None
    ) -> Case:
        """Check an observation; an attack that needs more than the tensors asks for it here."""
        return open_case(
            observation,
            tier=tier,
            history=history(observation) if history else (),
            max_images=budget.max_images,
            unroll=self.unroll,
        )

    @abstractmethod
    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Attack every lane within the limits of ``run``."""

    def prior(self) -> Attacker | None:
        """As `Attacker.prior`; an attack that only descends on an objective leaves that out.

        The statistics of the client's own batch, where an attack uses them, are left out too.
        """
        known = self.__dataclass_fields__
        if "objective" not in known:
            return None
        changes: dict[str, Any] = {"objective": NoObjective()}
        return replace(self, **changes | ({"bn": 0.0} if "bn" in known else {}))

    def _choose(
        self, case: Case, restarts: list[Solved], budget: Budget, seed: int, tier: Tier
    ) -> Reconstruction:
        best = min(range(len(restarts)), key=lambda i: restarts[i].loss)
        chosen = restarts[best]
        return Reconstruction(
            attack=self.name,
            observation=case.observation.key,
            tier=tier,
            seed=seed,
            images=chosen.images,
            label_probabilities=chosen.labels,
            final_loss=chosen.loss,
            loss_curve=chosen.curve,
            seconds=sum(r.seconds for r in restarts),
            iterations=chosen.iterations,
            all_restarts=[
                Restart(
                    images=r.images,
                    label_probabilities=r.labels,
                    loss=r.loss,
                    number=number,
                    cosine=r.cosine,
                    residual=r.residual,
                    loss_curve=r.curve,
                    iterations=r.iterations,
                    seconds=r.seconds,
                )
                for number, r in zip(budget.chosen_starts, restarts, strict=True)
            ],
            gradient_cosine=chosen.cosine,
            gradient_residual=chosen.residual,
            settings=for_model(self, case.observation.protocol.model).settings()
            | {
                "restart": budget.chosen_starts[best],
                "restarts": len(restarts),
                "images": case.images,
                "forward": _plain(case.forward),
                "evidence": case.evidence.notes,
            },
        )


def minimise(
    problem: Problem,
    search: Any,
    optimizer: LaneOptimizer,
    run: Run,
    *,
    objective: Objective,
    priors: Sequence[Prior] = (),
    weighting: LayerWeighting = "equal",
    unknowns: Tensors | None = None,
) -> Outcome:
    """Descend on ``objective`` plus ``priors``."""
    weighted = problem.weighted(layer_weights(problem.target, weighting))

    def loss(images: Tensor, labels: Tensor, found: Tensors) -> Tensor:
        value = weighted.distance(objective, weighted.simulate(images, labels, found))
        for prior in priors:
            value = value + prior(weighted, images)
        return value

    return descend(problem, search, optimizer, loss, run, unknowns or {})


def hard_labels(problem: Problem) -> Tensor:
    """Inferred labels as one-hot rows, ``(L, B, classes)``.

    After several unrolled steps each restart tries the next likely sequence.
    """
    rows = [
        infer_labels(case, choice=restart).labels
        for case, restart in zip(problem.cases, problem.restarts, strict=True)
    ]
    labels = torch.stack(rows).to(problem.device)
    return torch.nn.functional.one_hot(labels, problem.classes).to(problem.dtype)


def certain_labels(problem: Problem) -> Tensor | None:
    """Labels that the evidence knows, as `hard_labels` gives them; None where it knows none."""
    if any(case.evidence.labels is None for case in problem.cases):
        return None
    return hard_labels(problem)


def noise(problem: Problem, *shape: int) -> Tensor:
    """Standard normal ``(L, *shape)``, each lane from its own seed."""
    drawn = [torch.randn(*shape, generator=g) for g in problem.generators()]
    return torch.stack(drawn).to(problem.device, problem.dtype)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **inner}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return type(value).__name__
