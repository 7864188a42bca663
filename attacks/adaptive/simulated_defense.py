"""A client whose tensors go through the deterministic parts of its defenses before they are sent.

Given image and label these parts are functions of the gradient, so an adversary that knows them
compares the upload with what they would have made of a candidate's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bract.attacks.problem.client_model import DefendedForward, ForwardModel
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import Observation
from bract.updates.update import Tensors

Adapt = Callable[[ForwardModel, int], ForwardModel]


class Part(Protocol):
    """A deterministic part of a defense, hashable."""

    def __call__(self, sent: Tensors) -> Tensors:
        """Return what leaves it, for tensors ``(L, ...)`` by name, differentiably."""


@dataclass(frozen=True, kw_only=True)
class DefendedClient(DefendedForward):
    """The client of another forward model, with parts of defenses applied in order."""

    parts: tuple[Part, ...]

    @property
    def only_shortens(self) -> bool:
        """Return whether every part clips."""
        return all(isinstance(part, Clip) for part in self.parts)

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return what the client would send without the defense's noise."""
        sent = self.client(target_model, parameters, buffers, inputs, labels, unknowns)
        for part in self.parts:
            sent = part(sent)
        return sent


def defended_by(*parts: Part) -> Adapt:
    """Return what `Evidence.adapt` takes: the client with these parts after it."""

    def adapt(client: ForwardModel, images: int) -> ForwardModel:
        del images
        if isinstance(client, DefendedClient):
            return DefendedClient(client=client.client, parts=(*client.parts, *parts))
        return DefendedClient(client=client, parts=parts) if parts else client

    return adapt


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """An upload of one defense, and how to simulate what that defense makes of a candidate.

    Attributes
    ----------
    target
        The upload, in the units of what is simulated.
    unit
        Factor from an update to these units.
    adapt, buffers, weights, notes
        As `bract.attacks.problem.evidence.Evidence` has them; ``adapt`` may be None.
    """

    target: Tensors
    unit: float
    adapt: Adapt | None = None
    buffers: Tensors = field(default_factory=dict)
    weights: Tensors | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def followed_by(self, *parts: Part) -> Adapt:
        """Return the simulation with further parts after it."""
        first, then = self.adapt, defended_by(*parts)
        if first is None:
            return then
        return lambda client, images: then(first(client, images), images)


def simulated(observation: Observation, *parts: Part) -> Simulated:
    """Return the upload of a client whose gradient goes through these parts."""
    wanted = observation.gradient()
    return Simulated(
        target={name: wanted[name] for name in observation.parameters},
        unit=observation.law.to_gradient,
        adapt=defended_by(*parts) if parts else None,
    )


@dataclass(frozen=True)
class Clip:
    """``g min(1, bound / |g|)`` over all tensors as one vector.

    Attributes
    ----------
    bound
        Largest norm, in the units of what is simulated.
    order
        Of the norm.
    """

    bound: float
    order: Literal[1, 2] = 2

    def __call__(self, sent: Tensors) -> Tensors:
        """Clip each trial by its own norm."""
        rows = torch.cat([value.flatten(1) for value in sent.values()], dim=1)
        sizes = rows.abs().sum(dim=1) if self.order == 1 else rows.square().sum(dim=1)
        norm = sizes.clamp_min(1e-30) if self.order == 1 else sizes.clamp_min(1e-30).sqrt()
        factor = (self.bound / norm).clamp_max(1.0)
        return {n: v * factor.view(-1, *[1] * (v.dim() - 1)) for n, v in sent.items()}


@dataclass(frozen=True)
class Prune:
    """Zero the floor(ratio * D) smallest of D coordinates that moved, of all tensors or of each."""

    ratio: float
    scope: Literal["whole", "tensor"] = "whole"

    def __call__(self, sent: Tensors) -> Tensors:
        """Prune each trial by its own threshold, which counts as a constant."""
        rows = {n: v.detach().flatten(1).abs() for n, v in sent.items()}
        if self.scope == "whole":
            together = self._threshold(torch.cat(list(rows.values()), dim=1))
            limits = dict.fromkeys(rows, together)
        else:
            limits = {n: self._threshold(v) for n, v in rows.items()}
        return {n: v * (rows[n] > limits[n]).to(v).view_as(v) for n, v in sent.items()}

    def _threshold(self, magnitudes: Tensor) -> Tensor:
        """Return the largest magnitude that is dropped, ``(L, 1)``."""
        still = (magnitudes == 0.0).sum(dim=1, keepdim=True)
        dropped = (self.ratio * (magnitudes.shape[1] - still).double()).long()
        largest = magnitudes.sort(dim=1).values.gather(1, (still + dropped - 1).clamp_min(0))
        return torch.where(dropped > 0, largest, torch.zeros_like(largest))
