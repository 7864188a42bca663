"""What is known of the errors in an update's numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.protocol.update import Tensors

_EPSILON = 2.0**-24
"""Relative rounding of a float32 number, at most."""

_OUTLYING = 8.0
"""Median deviations above the median from which on a row is no noise: one in ten million is."""


def deviations_of(case: Case, own: Tensors) -> Tensors:
    """Return the standard deviation of every coordinate of the target, as far as it is known.

    That is declared noise, what the evidence bounds or trusts, and of FedAvg the rounding of
    float32 weights, whose difference the update is. Bounds on an inversion's errors, infinite where
    nothing is known, and trust are known but for a common factor.
    """
    evidence, law = case.read or case.evidence, case.law
    deviation = evidence.deviation
    found = {}
    for name, value in own.items():
        if deviation:
            found[name] = torch.full_like(value, deviation)
        elif name in (evidence.errors or {}):
            assert evidence.errors is not None
            error, size = evidence.errors[name].double().cpu(), evidence.target[name].abs().cpu()
            found[name] = torch.maximum(error, _EPSILON * size.double()).to(value.dtype)
        elif name in (evidence.weights or {}):
            assert evidence.weights is not None
            # A weight is 1 / (1 + (deviation / scale)^2) of one scale, which is not known.
            weight = evidence.weights[name].double().cpu()
            spread = (1.0 / weight - 1.0).clamp_min(0.0).sqrt()
            found[name] = spread.clamp_min(_EPSILON).to(value.dtype)
        elif name in (evidence.bounds or {}):
            assert evidence.bounds is not None
            bound = evidence.bounds[name].double().cpu() / 3.0**0.5
            rounding = _EPSILON * float(evidence.target[name].abs().max())
            if float(bound.max()) > rounding:
                found[name] = bound.clamp_min(max(rounding, 1e-30)).to(value.dtype)
        elif law.averaging and law.lr:
            size = value.abs().clamp_min(value.square().mean().sqrt())
            found[name] = _EPSILON / (law.lr * law.counted) * size
    return found


def rows_that_stand_out(gradient: Tensor) -> Tensor:
    """Return the rows ``(N, width)`` of a gradient that hold more than zeros, or than noise, int64.

    Noise is known by itself: the norms of its rows are all alike, but for those of few tokens.
    """
    norms: Tensor = gradient.double().norm(dim=1)
    middle = float(norms.median())
    if middle == 0.0:
        return (norms > 0.0).nonzero().flatten()
    spread = float((norms - middle).abs().median())
    alike = spread < 2.0 * middle / (2.0 * gradient.shape[1]) ** 0.5
    found: Tensor = (norms > middle + _OUTLYING * spread).nonzero().flatten()
    return found if alike else torch.arange(len(norms))
