"""Gradient matching problems of one shape, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import ORDERS, ForwardModel, local_training
from bract.attacks.problem.dropout import split_masks
from bract.attacks.problem.likelihoods import Likelihood
from bract.attacks.problem.objectives import Objective, RelativeError, weighted_sum
from bract.attacks.problem.over_rounds import of_model, round_names
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.problem.training_path import TrainingPath, moved
from bract.seeds import trial_seed
from bract.updates.update import Tensors


@dataclass(frozen=True)
class Problem:
    """L trials of gradient matching: each one restart of one case.

    Attributes
    ----------
    parameters, buffers, target, weights
        ``(L, ...)`` by name.
    alternatives, nuisance
        ``(L, K, ...)`` by name, or None; see `Evidence`.
    bounds
        ``(L, ...)`` by name, or None; see `Evidence`.
    starts
        Where unknowns of the forward model begin, ``(L, ...)`` by name; None has it draw them.
    seeds
        One seed a trial; everything random in a trial comes from it, so a result does not depend
        on which trials ran together.
    restarts
        Number of the restart, a trial.
    seed
        What the trials' seeds were derived from; for what several trials share.
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
    bounds: Tensors | None = None
    starts: Tensors | None = None
    seed: int = 0

    @classmethod
    def stack(
        cls,
        trials: Sequence[tuple[Case, int]],
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Problem:
        """Put cases of one shape and their restarts side by side on a device."""
        cases = tuple(case for case, _ in trials)
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

        target_model = first.target_model
        target_model.model.to(device)
        along = isinstance(first.forward, TrainingPath)
        paths = [moved(c.observation) if along else {} for c in cases]
        buffers = pile(
            [
                c.observation.buffers | c.evidence.buffers | path
                for c, path in zip(cases, paths, strict=True)
            ],
            (*first.target_model.buffer_names, *first.evidence.buffers, *paths[0]),
        )
        return cls(
            cases=cases,
            restarts=tuple(restart for _, restart in trials),
            seeds=tuple(trial_seed(seed, c.observation.key, r) for c, r in trials),
            parameters=pile(
                [c.observation.parameters for c in cases], first.target_model.parameter_names
            ),
            buffers=buffers | _orders(first, [restart for _, restart in trials], device),
            target=pile([c.evidence.target for c in cases], tuple(first.evidence.target)),
            weights=optional([c.evidence.weights for c in cases]),
            alternatives=optional([c.evidence.alternatives for c in cases]),
            nuisance=optional([c.evidence.nuisance for c in cases]),
            bounds=optional([c.evidence.bounds for c in cases]),
            seed=seed,
        )

    @property
    def trials(self) -> int:
        """Number of trials L."""
        return len(self.cases)

    @property
    def target_model(self) -> TargetModel:
        """The model under attack, the same for every trial."""
        return self.cases[0].target_model

    @property
    def forward(self) -> ForwardModel:
        """The forward model, the same for every trial."""
        return self.cases[0].forward

    @property
    def likelihood(self) -> Likelihood | None:
        """Likelihood of the noise in the target, the same for every trial."""
        return self.cases[0].evidence.likelihood

    @property
    def state(self) -> Tensors:
        """Buffers that the model itself reads, ``(L, ...)`` by name."""
        _, held = split_masks({name: v for name, v in self.buffers.items() if name != ORDERS})
        return of_model(held)

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """``(B, C, H, W)`` of one trial."""
        return (self.cases[0].images, *self.target_model.image_shape)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.target_model.classes

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of every tensor."""
        return next(iter(self.parameters.values())).dtype

    @property
    def through_depth(self) -> bool:
        """Return whether the model is deep and has kinks, and nothing is known of a noise."""
        traits = self.target_model.traits
        return self.likelihood is None and not traits.smooth and not traits.shallow

    def generators(self) -> list[torch.Generator]:
        """One CPU generator a trial, freshly seeded."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def unknowns(self) -> Tensors:
        """Starting values of what the forward model must find with images and labels."""
        found = self.starts
        if found is None:
            found = self.forward.unknowns(self.target_model, self.trials, self.generators())
        return {
            name: v.detach().to(self.device, self.dtype, copy=True).requires_grad_()
            for name, v in found.items()
        }

    def simulate(self, images: Tensor, labels: Tensor, unknowns: Tensors) -> Tensors:
        """Return what clients would have sent for images ``(L, B, C, H, W)`` in [0, 1]."""
        return self.forward(
            self.target_model,
            self.parameters,
            self.buffers,
            self.target_model.normalise(images),
            labels,
            unknowns,
        )

    def distance(self, objective: Objective, simulated: Tensors) -> Tensor:
        """The matching loss ``(L,)``."""
        return objective(simulated, self.reading(simulated), self.weights)

    def residuals(self, images: Tensor, labels: Tensor, unknowns: Tensors | None = None) -> Tensor:
        """Return the relative squared residual ``(L,)`` of images, without derivatives.

        Parameters
        ----------
        unknowns
            Of the forward model; None takes their starting values.
        """
        given = self.unknowns() if unknowns is None else unknowns
        return self.distance(RelativeError(), self.simulate(images, labels, given)).detach()

    def reading(self, simulated: Tensors) -> Tensors:
        """Return the target, read as favourably to ``simulated`` as the evidence allows.

        The target, but in every coordinate the nearest alternative or the nearest value within
        bounds, moved along the directions that are not known, or multiplied by the best factor of
        at least 1. This is the target
        itself where the evidence leaves nothing open.
        """
        target = self.target
        if self.alternatives is not None:
            target = target | {
                name: _nearest(simulated[name], target[name], others)
                for name, others in self.alternatives.items()
            }
        if self.bounds is not None:
            target = target | {
                name: target[name] + (simulated[name] - target[name]).clamp(-bound, bound)
                for name, bound in self.bounds.items()
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
            for names in round_names(self.cases[0]):
                target = target | self._scaled(simulated, {n: target[n] for n in names})
        return target

    def _scaled(self, simulated: Tensors, target: Tensors) -> Tensors:
        """Multiply tensors by the factor of at least 1 that brings them nearest."""
        cross, square = (
            weighted_sum(term, simulated, target, self.weights)
            for term in (lambda s, t: s * t, lambda _, t: t * t)
        )
        factor = (cross / square.clamp_min(1e-30)).clamp_min(1.0)
        return {n: v * factor.view(-1, *[1] * (v.dim() - 1)) for n, v in target.items()}

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
            bounds=None if self.bounds is None else cast(self.bounds),
            starts=None if self.starts is None else cast(self.starts),
        )

    def select(self, trials: Sequence[int]) -> Problem:
        """Return some trials as a problem of their own."""
        kept = list(trials)

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
            bounds=None if self.bounds is None else cut(self.bounds),
            starts=None if self.starts is None else cut(self.starts),
            seed=self.seed,
        )

    def weighted(self, weights: Tensors | None) -> Problem:
        """Return a copy whose coordinate weights are multiplied by ``weights``."""
        if weights is None:
            return self
        own = self.weights or {}
        product = {n: w * own[n] if n in own else w for n, w in weights.items()}
        return replace(self, weights=own | product)


def _orders(case: Case, restarts: Sequence[int], device: torch.device) -> Tensors:
    """Return the order in which each trial takes its images, where that is open."""
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
