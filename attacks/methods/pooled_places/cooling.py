"""Solve the equations of a block while the shares of places narrow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.methods.pooled_places.equations import NARROWEST, Equations
from bract.attacks.methods.pooled_places.smoothness import Roughness, Tied

_TRIES = 6
_POLISH = 3
_LEAST_DAMPING = 1e-10


@dataclass(frozen=True)
class Cooling:
    """A schedule of the shares' width.

    Attributes
    ----------
    widest
        First width, in the root mean square error of the highest outputs at the start.
    factor
        What multiplies it after every step.
    steps
        Most steps.
    """

    widest: float
    factor: float
    steps: int


@dataclass(frozen=True)
class Smoothness:
    """A weak prior on the differences of a map, for what its equations leave open.

    Attributes
    ----------
    shape
        Of the map, ``(C, H, W)``.
    weight
        Of the sum of their absolute values, against the squared errors, at the start.
    factor
        What multiplies it after every step.
    least
        Weight below which it does not fall.
    """

    shape: tuple[int, int, int]
    weight: float
    factor: float
    least: float = 0.0


@dataclass(frozen=True)
class Solution:
    """A map ``(N,)``, the root mean square of what its equations leave, and the steps taken."""

    values: Tensor
    left: float
    steps: int


def cooled(
    equations: Equations | Tied,
    start: Tensor,
    bounds: tuple[Tensor, Tensor],
    cooling: Cooling,
    *,
    enough: float,
    smoothness: Smoothness | None = None,
    due: Callable[[], bool] = lambda: False,
) -> Solution:
    """Lower the squared errors by damped Gauss-Newton steps, the shares narrower after each.

    Parameters
    ----------
    start
        Map ``(N,)``.
    bounds
        Lowest and highest values of the map, ``(N,)`` each.
    enough
        Root mean square error at which the search ends.
    due
        Returns whether it is to end with what it has.
    """
    low, high = bounds
    values, damping, steps = start, 1e-3, 0
    tops = equations.outputs(start).amax(-1) - equations.highest
    known = tops[equations.trust > 0]
    width = max(cooling.widest * float(known.square().mean().sqrt()), NARROWEST)
    weight = smoothness.weight if smoothness else 0.0
    while steps < cooling.steps and not due():
        prior = None if smoothness is None else Roughness.at(values, smoothness.shape, weight)
        values, damping = _step(equations, values, (low, high), width, damping, prior)
        steps += 1
        if equations.left(values) <= enough:
            break
        width = max(width * cooling.factor, NARROWEST)
        if smoothness is not None:
            weight = max(weight * smoothness.factor, smoothness.least)
    if smoothness is None or not smoothness.least:
        for _ in range(0 if due() else _POLISH):
            values, damping = _step(equations, values, (low, high), NARROWEST, damping, None)
    return Solution(values, equations.left(values), steps)


def _step(
    equations: Equations | Tied,
    values: Tensor,
    bounds: tuple[Tensor, Tensor],
    width: float,
    damping: float,
    prior: Roughness | None,
) -> tuple[Tensor, float]:
    """Return the map after one step, with values at a bound held there, and the next damping."""
    low, high = bounds
    errors, jacobian = equations.linearised(values, width)
    normal, slope = jacobian.T @ jacobian, jacobian.T @ errors
    if prior is not None:
        rough = prior.normal(len(values))
        normal, slope = normal + rough, slope + rough @ values
    before = float(errors.square().sum()) + (prior(values) if prior else 0.0)
    held = ((values <= low) & (slope > 0)) | ((values >= high) & (slope < 0))
    free = (~held).nonzero().flatten()
    inside, downhill = normal[free][:, free], -slope[free]
    for _ in range(_TRIES):
        damped = inside.clone()
        damped.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            moved = values.clone()
            moved[free] += torch.cholesky_solve(downhill[:, None], factor)[:, 0]
            moved = torch.minimum(torch.maximum(moved, low), high)
            after = float(equations.errors(moved, width).square().sum())
            if after + (prior(moved) if prior else 0.0) < before:
                return moved, max(damping / 5.0, _LEAST_DAMPING)
        damping *= 10.0
    return values, damping
