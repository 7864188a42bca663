"""Distances of simulated tensors from captured ones, one number a trial.

Every objective takes two mappings of names to ``(L, ...)`` tensors and optional weights of the
same shapes in [0, 1] (what the attacker trusts of each coordinate), and returns ``(L,)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from bract.updates.update import Tensors


@runtime_checkable
class Objective(Protocol):
    """A distance between what was captured and what candidate images produce.

    Attributes
    ----------
    component
        How a record of what ran names it.
    """

    component: ClassVar[str]

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``(L,)``, lower is nearer."""


@dataclass(frozen=True)
class Cosine:
    """One minus the cosine over all layers as one vector (IG, Geiping et al. 2020, eq. 4).

    Computed as half the squared distance of the two unit vectors, which is the same number
    without the cancellation of ``1 - cos`` near a match: float32 resolves 1e-14 instead of 1e-7.
    """

    component: ClassVar[str] = "cosine matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``1 - <s, c> / (|s| |c|)`` in [0, 2]."""
        simulated_norm = weighted_sum(lambda s, _: s * s, simulated, captured, weights).clamp_min(
            1e-30
        )
        captured_norm = weighted_sum(lambda _, c: c * c, simulated, captured, weights).clamp_min(
            1e-30
        )
        s_scale, c_scale = simulated_norm.rsqrt(), captured_norm.rsqrt()
        return 0.5 * weighted_sum(
            lambda s, c: (s * _trial(s_scale, s) - c * _trial(c_scale, c)).square(),
            simulated,
            captured,
            weights,
        )


@dataclass(frozen=True)
class SquaredError:
    """Sum of squared differences (DLG, Zhu et al. 2019, eq. 3)."""

    component: ClassVar[str] = "squared error matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``|s - c|^2``."""
        return weighted_sum(lambda s, c: (s - c).square(), simulated, captured, weights)


@dataclass(frozen=True)
class RelativeError:
    """Squared error over the squared norm of what was captured: free of the gradient's scale."""

    component: ClassVar[str] = "relative error matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``|s - c|^2 / |c|^2``."""
        error = weighted_sum(lambda s, c: (s - c).square(), simulated, captured, weights)
        norm = weighted_sum(lambda _, c: c.square(), simulated, captured, weights)
        return error / norm.clamp_min(1e-30)


@dataclass(frozen=True)
class SquaredPlusNorm:
    """GRNN's matching loss, ``|s - c|^2 + |s - c|`` (thesis, eq. 3.4).

    The published code calls its second term a Wasserstein distance; on gradient vectors it
    evaluates to the Euclidean norm.
    """

    component: ClassVar[str] = "squared error and norm matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``d^2 + d`` for the Euclidean distance ``d``."""
        squared = weighted_sum(lambda s, c: (s - c).square(), simulated, captured, weights)
        return squared + (squared + 1e-24).sqrt()


@dataclass(frozen=True)
class NoObjective:
    """Match nothing: what a prior makes without any gradient, the baseline of every table."""

    component: ClassVar[str] = "no matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return zeros that keep the graph."""
        return 0.0 * weighted_sum(lambda s, _: s, simulated, captured, weights)


LayerWeighting = Literal["equal", "linear", "exponential"]


def layer_weights(like: Tensors, how: LayerWeighting) -> Tensors | None:
    """Weights that favour early tensors, as full tensors ``like``; None for ``equal``.

    ``linear`` falls from 2 to near 0 with the position of the tensor, ``exponential`` halves from
    one tensor to the next; both have mean 1 over tensors. Early layers see the image most
    directly.
    """
    if how == "equal":
        return None
    count = len(like)
    raw = [2.0 * (count - i) / (count + 1) if how == "linear" else 0.5**i for i in range(count)]
    mean = sum(raw) / count
    return {
        name: torch.full_like(value, weight / mean)
        for (name, value), weight in zip(like.items(), raw, strict=True)
    }


def agreement(
    simulated: Tensors, captured: Tensors, weights: Tensors | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosine and the relative residual of a match, each ``(L,)``."""
    cosine = 1.0 - Cosine()(simulated, captured, weights)
    return cosine, RelativeError()(simulated, captured, weights).sqrt()


def layer_cosines(simulated: Tensors, captured: Tensors) -> Tensors:
    """Return the cosine of each tensor, ``(L,)`` by name; 0 for zeros."""
    found = {}
    for name, value in captured.items():
        one = simulated[name].reshape(len(value), -1)
        other = value.reshape(len(value), -1)
        norms = one.norm(dim=1) * other.norm(dim=1)
        found[name] = (one * other).sum(dim=1) / norms.where(norms > 0, 1.0)
    return found


def factor(simulated: Tensors, captured: Tensors, weights: Tensors | None = None) -> Tensor:
    """Return the factor from simulated to captured along it, ``(L,)``; not finite for zeros."""
    dot = weighted_sum(lambda s, c: s * c, simulated, captured, weights)
    own = weighted_sum(lambda s, _: s * s, simulated, captured, weights)
    return torch.where(dot == 0.0, torch.nan, dot / own)


def _trial(factor: Tensor, like: Tensor) -> Tensor:
    return factor.view(-1, *[1] * (like.dim() - 1))


def weighted_sum(
    term: Callable[[Tensor, Tensor], Tensor],
    simulated: Tensors,
    captured: Tensors,
    weights: Tensors | None,
) -> Tensor:
    """Sum ``term(simulated, captured)`` over all coordinates, by weight, ``(L,)``."""
    trials: list[Tensor] = []
    for name, value in captured.items():
        part = term(simulated[name], value)
        if weights is not None and name in weights:
            part = part * weights[name]
        # Not flattened: the gradient of a linear layer is transposed, and would be copied.
        trials.append(part.sum(dim=tuple(range(1, part.dim()))) if part.dim() > 1 else part)
    return torch.stack(trials).sum(dim=0)
