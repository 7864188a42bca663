"""Against FedKL: regress gamma and beta of every locked layer together with the image."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bract.attacks.adaptive.declared import Declared, declared
from bract.attacks.adaptive.statistics import simulated_statistics, statistics_to_match
from bract.attacks.descent import Outcome, Run
from bract.attacks.evidence import ADAPTIVE, Evidence, Tier
from bract.attacks.matching import Attack, History
from bract.attacks.problem import Case, Problem
from bract.attacks.reconstruction import Budget
from bract.attacks.simulation import ForwardModel, LocalTraining, local_training, loss_gradient
from bract.attacks.victim import Victim, victim_of
from bract.errors import BractError
from bract.models import key_locks
from bract.models.keylock import Lock
from bract.observation import Observation
from bract.update import Tensors

class FedKLHyper(Declared):
    """Declared hyper-parameters of FedKL; see the defense for their meaning."""

    blocks: Literal["first", "every"] = "first"
    key_length: Annotated[int, Field(ge=1, le=2**20)] = 1024
    relu: bool = True
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5


@dataclass(frozen=True, kw_only=True)
class LockedClient:
    layers: tuple[tuple[str, int], ...]
    key_length: int
    relu: bool
    rate: float
    training: LocalTraining | None = None
    known: bool = False
    statistics: tuple[str, ...] = ()
    start: str = "draw"

    def unknowns(self, victim: Victim, lanes: int, generators: list[torch.Generator]) -> Tensors:
        del victim, lanes
        if self.known:
            return {}
        drawn = [self._draw(generator) for generator in generators]
        return {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def _draw(self, generator: torch.Generator) -> Tensors:
        if self.start == "mean":
            s = (1 / 9 + 1 / (3 * self.key_length)) ** 0.5
            m = s * (2 / torch.pi) ** 0.5
            return {f"{n}.{p}": torch.full((c,), v) for n, c in self.layers for p, v in (("gamma", m), ("beta", m / 2))}
        lock = Lock.draw(dict(self.layers), self.key_length, relu=self.relu, generator=generator)
        return lock.coefficients()

    def __call__(
        self,
        victim: Victim,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        state = buffers | unknowns
        if self.training is None:
            seen = simulated_statistics(victim, parameters, state, inputs, self.statistics)
            return loss_gradient(victim, parameters, state, inputs, labels) | seen
        training, count = self.training, inputs.shape[1]
        names = [f"{layer}.{part}" for layer, _ in self.layers for part in ("gamma", "beta")]

        def gradient(step: int, current: Tensors) -> Tensors:
            taken = training.positions(step, count)
            held = {n: v.clamp_min(0.0) if self.relu and n in names else v for n, v in current.items()}
            found = loss_gradient(victim, held, buffers, inputs[:, taken], labels[:, taken])
            return {
                n: g * (current[n] > 0) if self.relu and n in names else g
                for n, g in found.items()
            }

        pace = self.rate * (1.0 + self.key_length / 3.0)
        start = parameters | {name: state[name] for name in names}
        end = training.trajectory(start, gradient, dict.fromkeys(names, pace))
        return training.mean_direction(parameters, end)


@ADAPTIVE.register("fedkl")
def regress_lock(observation: Observation, history: Sequence[Observation]) -> Evidence:
    del history
    hyper = declared(FedKLHyper, observation)
    strange = sorted(set(observation.update) - set(observation.parameters))
    if strange:
        raise BractError(
            f"{observation.key}: the update holds {', '.join(strange[:5])}, but the declared FedKL "
            "keeps the lock at the client; correct protocol.defenses"
        )
    victim = victim_of(observation)
    layers = tuple((n, m.num_features) for n, m in key_locks(victim.model).items())
    statistics, weights = statistics_to_match(observation, victim)

    def adapt(forward: ForwardModel, images: int) -> LockedClient:
        return LockedClient(
            layers=layers,
            key_length=hyper.key_length,
            relu=hyper.relu,
            rate=hyper.rate,
            training=local_training(forward),
            statistics=tuple(n.removesuffix(".running_mean") for n in statistics if n.endswith("mean")),
        )

    wanted = observation.gradient()
    return Evidence(
        target={name: wanted[name] for name in observation.parameters} | statistics,
        weights=weights or None,
        adapt=adapt,
    )


@dataclass(frozen=True, kw_only=True)
class KeyKnown(Attack):
    name: ClassVar[str] = "key-known"

    using: Attack
    locks: Mapping[str, Tensors]

    def open(
        self, observation: Observation, budget: Budget, tier: Tier, history: History | None
    ) -> Case:
        case = self.using.open(observation, budget, "adaptive", history)
        held = self.locks[observation.key]
        assert isinstance(case.forward, LockedClient)
        return replace(
            case,
            evidence=replace(case.evidence, buffers=dict(held)),
            forward=replace(case.forward, known=True),
        )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        return self.using.solve(problem, run)
