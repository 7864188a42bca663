"""Against FedKL: regress gamma and beta of every locked layer together with the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bract.attacks.adaptive.declared import Declared, declared
from bract.attacks.adaptive.statistics import (
    layers_of,
    simulated_statistics,
    statistics_to_match,
)
from bract.attacks.descent import Outcome, Run
from bract.attacks.engine import Engine
from bract.attacks.evidence import ADAPTIVE, Evidence, Tier
from bract.attacks.matching import Attack, History
from bract.attacks.problem import Case, Problem
from bract.attacks.reconstruction import Budget, Reconstruction, Refusal
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
    """A FedKL client whose gamma and beta, ``(channels,)`` each, are unknowns.

    The key and the lock layers need not be found: only what they make of each other enters the
    update. Values are plain numbers, not behind a ReLU, so one that the client's ReLU holds at zero
    can be reached and left again.

    Where steps are unrolled the lock learns along. A step moves gamma by
    ``lr * rate * (1 + |key|^2)`` times its gradient; ``|key|^2`` of a key from U[0, 1)^K is K / 3
    to within ``0.3 sqrt(K)``. The unknowns are then the values before the first step.

    Attributes
    ----------
    layers
        Name and channels of every locked layer.
    key_length, relu, rate
        As the protocol declares them.
    training
        The local steps that are unrolled; None for a gradient.
    statistics
        Layers whose batch statistics are matched as well.
    known
        Whether gamma and beta stand among the buffers; then nothing is unknown.
    """

    layers: tuple[tuple[str, int], ...]
    key_length: int
    relu: bool
    rate: float
    training: LocalTraining | None = None
    statistics: tuple[str, ...] = ()
    known: bool = False

    def unknowns(self, victim: Victim, lanes: int, generators: list[torch.Generator]) -> Tensors:
        """Draw a lock for each lane as a client draws its own: restarts start apart."""
        del victim, lanes
        if self.known:
            return {}
        drawn = [
            Lock.draw(
                dict(self.layers), self.key_length, relu=self.relu, generator=generator
            ).coefficients()
            for generator in generators
        ]
        return {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def __call__(
        self,
        victim: Victim,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return what the client would send, and the batch statistics that are matched."""
        state = buffers | unknowns
        if self.training is None:
            seen = simulated_statistics(victim, parameters, state, inputs, self.statistics)
            return loss_gradient(victim, parameters, state, inputs, labels) | seen
        training, names = self.training, self.names
        batch, fixed = training.batches(inputs, labels, buffers)

        def gradient(step: int, current: Tensors) -> Tensors:
            positive = {n: v.clamp_min(0.0) for n, v in current.items() if self.relu and n in names}
            found = loss_gradient(victim, current | positive, fixed, *batch(step))
            return found | {n: found[n] * (current[n] > 0) for n in positive}

        pace = self.rate * (1.0 + self.key_length / 3.0)
        start = parameters | {name: state[name] for name in names}
        end = training.trajectory(start, gradient, dict.fromkeys(names, pace))
        return training.mean_direction(parameters, end)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of gamma and beta of every locked layer."""
        return tuple(f"{layer}.{part}" for layer, _ in self.layers for part in ("gamma", "beta"))


@ADAPTIVE.register("fedkl")
def regress_lock(observation: Observation, history: Sequence[Observation]) -> Evidence:
    """Make gamma and beta of the locked layers unknowns, to be found together with the images.

    They are 2 x channels numbers against thousands of equations; any attack finds them. Where the
    client returned its normalisation buffers after one step, the statistics of its batch are
    matched too (`bract.attacks.adaptive.statistics`).

    Raises
    ------
    BractError
        If a declared hyper-parameter is unknown or out of range, the capture's parameters are not
        those of the locked model, or the update holds what FedKL keeps at the client.
    """
    del history
    hyper = declared(FedKLHyper, observation)
    if leaked := sorted(set(observation.update) - set(observation.parameters)):
        raise BractError(
            f"{observation.key}: the update holds {', '.join(leaked[:5])}, which was not sent to "
            "the client; under the declared FedKL nothing of the lock leaves it; correct "
            "protocol.defenses"
        )
    victim = victim_of(observation)
    layers = tuple((n, m.num_features) for n, m in key_locks(victim.model).items())
    statistics, weights = statistics_to_match(observation, victim)
    wanted = observation.gradient()

    def adapt(forward: ForwardModel, images: int) -> LockedClient:
        del images
        return LockedClient(
            layers=layers,
            key_length=hyper.key_length,
            relu=hyper.relu,
            rate=hyper.rate,
            training=local_training(forward),
            statistics=layers_of(statistics),
        )

    several = observation.protocol.algorithm == "fedavg" and observation.protocol.local_steps != 1
    notes: dict[str, Any] = {
        "defense": "fedkl",
        "method": "regressed gamma and beta of the locked layers together with the images",
        "locked_layers": [layer for layer, _ in layers],
        "unknowns": sum(2 * channels for _, channels in layers),
        "batch_statistics": "matched" if statistics else "not known from this capture",
    }
    if several:
        notes["local_steps"] = (
            "where the steps are unrolled, gamma and beta learn along at the pace of a key of "
            "average length; elsewhere they count as constants of the round"
        )
    return Evidence(
        target={name: wanted[name] for name in observation.parameters} | statistics,
        weights=weights or None,
        adapt=adapt,
        notes=notes,
    )


def key_known(using: Attack, locks: Mapping[str, Tensors]) -> Attack:
    """Return an attack as somebody runs it who holds gamma and beta: the bound to compare with.

    For benchmarks and tests; no tier of an audit knows a client's secrets. Everything but the
    unknowns is as in the adaptive tier, whatever tier is asked for.

    Parameters
    ----------
    locks
        By `Observation.key`, what `bract.models.keylock.Lock.coefficients` returned before the
        client trained.
    """
    return _KeyKnown(using=using, locks=locks, unroll=using.unroll)


@dataclass(frozen=True, kw_only=True)
class _KeyKnown(Attack):
    name: ClassVar[str] = "key-known"

    using: Attack
    locks: Mapping[str, Tensors] = field(repr=False)

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
        if budget.iterations is None and budget.seconds is None:
            budget = replace(budget, iterations=self.using.iterations)
        return super().run(
            observations, budget=budget, seed=seed, tier=tier, engine=engine, history=history
        )

    def open(
        self, observation: Observation, budget: Budget, tier: Tier, history: History | None
    ) -> Case:
        del tier
        case = self.using.open(observation, budget, "adaptive", history)
        if not isinstance(case.forward, LockedClient):
            raise BractError(f"{observation.key}: declares no FedKL; there is no key to know")
        return replace(
            case,
            evidence=replace(case.evidence, buffers=dict(self.locks[observation.key])),
            forward=replace(case.forward, known=True),
        )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        return self.using.solve(problem, run)
