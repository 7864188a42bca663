"""Elementwise activations and their inverses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.errors import BractError

_INSIDE = 1e-7


@dataclass(frozen=True)
class Activation:
    """A nondecreasing elementwise function, and what its value implies of its argument.

    Attributes
    ----------
    forward
        The function.
    inverse
        Argument of a value; anything where the value does not determine it.
    slope
        Derivative, as a function of the value.
    low, high
        Range of values.
    floor
        Whether a value of ``low`` is that of every argument up to ``low``, as ReLU's zero does.
    """

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    low: float = -float("inf")
    high: float = float("inf")
    floor: bool = False


def _relu() -> Activation:
    return Activation(torch.relu, lambda y: y, lambda y: (y > 0).to(y), low=0.0, floor=True)


def _leaky_relu(slope: float = 0.01) -> Activation:
    if not slope > 0:
        raise BractError(
            f"leaky_relu with a slope of {slope} cannot be inverted", code="attack-unsuited"
        )
    return Activation(
        lambda z: F.leaky_relu(z, slope),
        lambda y: torch.where(y > 0, y, y / slope),
        lambda y: torch.where(y > 0, torch.ones_like(y), torch.full_like(y, slope)),
    )


def _sigmoid() -> Activation:
    return Activation(
        torch.sigmoid,
        lambda y: torch.logit(y.clamp(_INSIDE, 1 - _INSIDE)),
        lambda y: y.clamp(0, 1) * (1 - y.clamp(0, 1)),
        low=0.0,
        high=1.0,
    )


def _tanh() -> Activation:
    return Activation(
        torch.tanh,
        lambda y: torch.atanh(y.clamp(-1 + _INSIDE, 1 - _INSIDE)),
        lambda y: 1 - y.clamp(-1, 1).square(),
        low=-1.0,
        high=1.0,
    )


def _elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Activation:
    if alpha <= 0 or scale != 1 or input_scale != 1:
        raise BractError("elu with these settings is not inverted", code="attack-unsuited")
    return Activation(
        lambda z: F.elu(z, alpha),
        lambda y: torch.where(y > 0, y, torch.log1p((y / alpha).clamp_min(-1 + _INSIDE))),
        lambda y: torch.where(y > 0, torch.ones_like(y), (y + alpha).clamp_min(0)),
        low=-alpha,
    )


def _softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    return Activation(
        lambda z: F.softplus(z, beta, threshold),
        lambda y: y + torch.log(-torch.expm1(-beta * y.clamp_min(_INSIDE))) / beta,
        lambda y: -torch.expm1(-beta * y.clamp_min(0)),
        low=0.0,
    )


ACTIVATIONS: dict[str, Callable[..., Activation]] = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "elu": _elu,
    "softplus": _softplus,
}
"""By the name of the operation; each takes its further arguments."""
