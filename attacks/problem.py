"""Gradient matching problems of one shape, side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bract.attacks.evidence import Evidence, Tier, evidence_for
from bract.attacks.objectives import Objective, weighted_sum
from bract.attacks.simulation import (
    ORDERS,
    ForwardModel,
    forward_model,
    images_in,
    local_training,
)
from bract.attacks.victim import Victim, victim_of
from bract.attacks.visibility import scaled_names, visible_share
from bract.errors import BractError
from bract.observation import Observation
from bract.update import Tensors


@dataclass(frozen=True)
class Case:
    """One observation, checked and ready to attack."""

    observation: Observation
    victim: Victim
    evidence: Evidence
    forward: ForwardModel
    images: int

    @property
    def shape(self) -> tuple[Any, ...]:
        """Cases with equal shapes can run as one batch."""
        p = self.observation.protocol
        return (
            (p.model, p.activation, p.image_shape, p.classes, p.mean, p.std, p.norm_mode),
            self.images,
            self.forward,
            tuple(self.evidence.target),
            tuple(self.evidence.weights or ()),
            _counts(self.evidence.alternatives),
            _counts(self.evidence.nuisance),
            self.evidence.unknown_factor,
            self.evidence.labels is None,
            tuple(self.evidence.buffers),
            tuple(tuple(v.shape) for v in self.evidence.target.values()),
        )


def open_case(
    observation: Observation,
    *,
    tier: Tier,
    history: Sequence[Observation] = (),
    max_images: int,
    unroll: int,
) -> Case:
    """Check an observation and decide what to match and how many images to look for.

    Raises
    ------
    BractError
        Naming the observation and the reason why no attack can use it.
    """
    victim = victim_of(observation)
    try:
        images = images_in(observation.protocol, max_images)
    except BractError as error:
        raise BractError(f"{observation.key}: {error}") from error
    evidence = evidence_for(observation, tier, history)
    known = {*victim.parameter_names, *observation.buffers}
    strange = sorted(set(evidence.target) - known)
    if strange or not evidence.target:
        raise BractError(f"{observation.key}: nothing to match among {', '.join(strange[:5])}")
    if not any(bool(value.any()) for value in evidence.target.values()):
        raise BractError(f"{observation.key}: the update is zero in every coordinate")
    forward = evidence.forward or forward_model(observation.protocol, images=images, unroll=unroll)
    if evidence.adapt is not None:
        forward = evidence.adapt(forward, images)
    scaled = scaled_names(victim, evidence)
    if any(name in scaled for name in evidence.weights or ()):
        share = visible_share(victim, observation, forward, evidence, images)
        weights = dict(evidence.weights or {})
        for name in scaled:
            own = weights.get(name)
            weights[name] = (torch.ones_like(evidence.target[name]) if own is None else own) / share
        notes = evidence.notes | {"visible": share}
        evidence = replace(evidence, weights=weights, notes=notes)
    return Case(observation, victim, evidence, forward, images)


@dataclass(frozen=True)
class Problem:
    """L lanes of gradient matching: each one restart of one case.

    Attributes
    ----------
    parameters, buffers, target, weights
        ``(L, ...)`` by name.
    alternatives, nuisance
        ``(L, K, ...)`` by name, or None; see `Evidence`.
    seeds
        One seed a lane; everything random in a lane comes from it, so a result does not depend
        on which lanes ran together.
    restarts
        Number of the restart, a lane.
    """

    cases: tuple[Case, ...]
    restarts: tuple[int, ...]
    seeds: tuple[int, ...]
    parameters: Tensors
    buffers: Tensors
    target: Tensors
    weights: Tensors | None
    alternatives: Tensors | None = None
    nuisance: Tensors | None = None

    @classmethod
    def stack(
        cls,
        lanes: Sequence[tuple[Case, int]],
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Problem:
        """Put cases of one shape and their restarts side by side on a device."""
        cases = tuple(case for case, _ in lanes)
        first = cases[0]

        def pile(groups: Sequence[Tensors], names: Sequence[str]) -> Tensors:
            piled = {}
            for name in names:
                value = torch.stack([g[name].detach() for g in groups]).to(device)
                piled[name] = value.to(dtype) if value.is_floating_point() else value
            return piled

        def optional(groups: Sequence[Tensors | None]) -> Tensors | None:
            given = [group for group in groups if group is not None]
            return pile(given, tuple(given[0])) if given else None

        victim = first.victim
        victim.model.to(device)
        buffers = pile(
            [c.observation.buffers | c.evidence.buffers for c in cases],
            (*first.victim.buffer_names, *first.evidence.buffers),
        )
        return cls(
            cases=cases,
            restarts=tuple(restart for _, restart in lanes),
            seeds=tuple(lane_seed(seed, c.observation.key, r) for c, r in lanes),
            parameters=pile(
                [c.observation.parameters for c in cases], first.victim.parameter_names
            ),
            buffers=buffers | _orders(first, [restart for _, restart in lanes], device),
            target=pile([c.evidence.target for c in cases], tuple(first.evidence.target)),
            weights=optional([c.evidence.weights for c in cases]),
            alternatives=optional([c.evidence.alternatives for c in cases]),
            nuisance=optional([c.evidence.nuisance for c in cases]),
        )

    @property
    def lanes(self) -> int:
        """Number of lanes L."""
        return len(self.cases)

    @property
    def victim(self) -> Victim:
        """The model under attack, the same for every lane."""
        return self.cases[0].victim

    @property
    def model(self) -> str | None:
        """Declared name of the model, the same for every lane."""
        return self.cases[0].observation.protocol.model

    @property
    def forward(self) -> ForwardModel:
        """How a client is simulated, the same for every lane."""
        return self.cases[0].forward

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """``(B, C, H, W)`` of one lane."""
        shape = self.cases[0].observation.protocol.image_shape
        if shape is None:
            raise AssertionError("open_case refuses protocols without an image shape")
        return (self.cases[0].images, *shape)

    @property
    def classes(self) -> int:
        """Number of classes."""
        classes = self.cases[0].observation.protocol.classes
        if classes is None:
            raise AssertionError("open_case refuses protocols without classes")
        return classes

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of every tensor."""
        return next(iter(self.parameters.values())).dtype

    def generators(self) -> list[torch.Generator]:
        """One CPU generator a lane, freshly seeded."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def unknowns(self) -> Tensors:
        """Starting values of what the forward model must find beside images and labels."""
        found = self.forward.unknowns(self.victim, self.lanes, self.generators())
        return {
            name: v.detach().to(self.device, self.dtype, copy=True).requires_grad_()
            for name, v in found.items()
        }

    def simulate(self, images: Tensor, labels: Tensor, unknowns: Tensors) -> Tensors:
        """What clients would have sent for images ``(L, B, C, H, W)`` in [0, 1]."""
        return self.forward(
            self.victim,
            self.parameters,
            self.buffers,
            self.victim.normalise(images),
            labels,
            unknowns,
        )

    def distance(self, objective: Objective, simulated: Tensors) -> Tensor:
        """The matching loss ``(L,)``."""
        return objective(simulated, self.reading(simulated), self.weights)

    def reading(self, simulated: Tensors) -> Tensors:
        """What the captured tensors say, as favourably to ``simulated`` as they allow.

        The target, but in every coordinate the nearest alternative, moved along the directions
        that are not known, or multiplied by the best factor of at least 1. This is the target
        itself where the evidence leaves nothing open.
        """
        target = self.target
        if self.alternatives is not None:
            target = target | {
                name: _nearest(simulated[name], target[name], others)
                for name, others in self.alternatives.items()
            }
        if self.nuisance is not None:
            shares = torch.stack(
                [
                    (along * (simulated[name] - target[name])[:, None]).flatten(2).sum(dim=2)
                    for name, along in self.nuisance.items()
                ]
            ).sum(dim=0)
            target = target | {
                name: target[name] + torch.einsum("lr,lr...->l...", shares, along)
                for name, along in self.nuisance.items()
            }
        if self.cases[0].evidence.unknown_factor:
            cross, square = (
                weighted_sum(term, simulated, target, self.weights)
                for term in (lambda s, t: s * t, lambda _, t: t * t)
            )
            factor = (cross / square.clamp_min(1e-30)).clamp_min(1.0)
            target = {n: v * factor.view(-1, *[1] * (v.dim() - 1)) for n, v in target.items()}
        return target

    def to(self, dtype: torch.dtype) -> Problem:
        """Return a copy in another floating-point type."""

        def cast(tensors: Tensors) -> Tensors:
            return {
                n: v.detach().to(dtype) if v.is_floating_point() else v for n, v in tensors.items()
            }

        return replace(
            self,
            parameters=cast(self.parameters),
            buffers=cast(self.buffers),
            target=cast(self.target),
            weights=None if self.weights is None else cast(self.weights),
            alternatives=None if self.alternatives is None else cast(self.alternatives),
            nuisance=None if self.nuisance is None else cast(self.nuisance),
        )

    def select(self, lanes: Sequence[int]) -> Problem:
        """Return some lanes as a problem of their own."""
        kept = list(lanes)

        def cut(tensors: Tensors) -> Tensors:
            return {n: v[kept] for n, v in tensors.items()}

        return Problem(
            cases=tuple(self.cases[i] for i in kept),
            restarts=tuple(self.restarts[i] for i in kept),
            seeds=tuple(self.seeds[i] for i in kept),
            parameters=cut(self.parameters),
            buffers=cut(self.buffers),
            target=cut(self.target),
            weights=None if self.weights is None else cut(self.weights),
            alternatives=None if self.alternatives is None else cut(self.alternatives),
            nuisance=None if self.nuisance is None else cut(self.nuisance),
        )

    def weighted(self, weights: Tensors | None) -> Problem:
        """Return a copy whose coordinate weights are multiplied by ``weights``."""
        if weights is None:
            return self
        own = self.weights or {}
        product = {n: w * own[n] if n in own else w for n, w in weights.items()}
        return replace(self, weights=own | product)


def _orders(case: Case, restarts: Sequence[int], device: torch.device) -> Tensors:
    """In which order each lane takes its images, where that is open."""
    training = local_training(case.forward)
    if training is None:
        return {}
    orders = [training.order(case.images, restart)[0] for restart in restarts]
    given = [order for order in orders if order is not None]
    return {ORDERS: torch.tensor(given, device=device)} if given else {}


def _nearest(simulated: Tensor, target: Tensor, others: Tensor) -> Tensor:
    choices = torch.cat([target[:, None], others], dim=1)
    pick = (choices - simulated[:, None]).abs().argmin(dim=1, keepdim=True)
    return choices.gather(1, pick)[:, 0]


def _counts(group: Tensors | None) -> tuple[tuple[str, int], ...]:
    return tuple((name, len(value)) for name, value in (group or {}).items())


def lane_seed(seed: int, key: str, restart: int) -> int:
    """A seed for one restart on one observation, independent of everything else."""
    digest = hashlib.sha256(f"{seed}/{key}/{restart}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
