"""Matching losses that GRNN's table of losses compares and no attack uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bract.attacks import Cosine
from bract.attacks.problem.objectives import SquaredError
from bract.updates.update import Tensors


@dataclass(frozen=True)
class Norm:
    """The Euclidean norm of the difference: what GRNN's code calls a Wasserstein distance."""

    component: ClassVar[str] = "norm matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``|s - c|``."""
        return (SquaredError()(simulated, captured, weights) + 1e-24).sqrt()


@dataclass(frozen=True)
class CosineAndSquared:
    """Squared error plus one minus the cosine."""

    component: ClassVar[str] = "squared error and cosine matching"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``|s - c|^2 + 1 - cos(s, c)``."""
        squared = SquaredError()(simulated, captured, weights)
        return squared + Cosine()(simulated, captured, weights)
