"""Negative log-likelihoods of an upload, in nats, for defenses that add noise.

Each is an objective (`bract.attacks.problem.objectives.Objective`): ``captured`` is the upload u,
``simulated`` what would have been sent without the noise, m(x), for candidate images x. What does
not depend on x is left out. Coordinate weights are trust, which a likelihood has no place for:
they multiply a coordinate's term where they are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.problem.objectives import weighted_sum
from bract.protocol.update import Tensors


@dataclass(frozen=True)
class GaussianLikelihood:
    """``-log p(u | m) = |u - m|^2 / (2 sigma^2)`` plus ``D log(sigma sqrt(2 pi))``, left out.

    Attributes
    ----------
    deviation
        sigma, in the units of the tensors that are compared.
    """

    deviation: float
    component: ClassVar[str] = "Gaussian likelihood"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        factor = 0.5 / self.deviation**2
        return factor * weighted_sum(lambda s, c: (s - c).square(), simulated, captured, weights)

    def draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise of this law, of the shape of ``like``, from a CPU generator."""
        return self.deviation * torch.randn(like.shape, generator=generator).to(like)


@dataclass(frozen=True)
class LaplaceLikelihood:
    """``-log p(u | m) = |u - m|_1 / b`` plus ``D log(2 b)``, left out, with b = sigma / sqrt(2).

    Attributes
    ----------
    deviation
        sigma, the standard deviation of one coordinate's noise.
    """

    deviation: float
    component: ClassVar[str] = "Laplace likelihood"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        factor = math.sqrt(2.0) / self.deviation
        return factor * weighted_sum(lambda s, c: (s - c).abs(), simulated, captured, weights)

    def draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise of this law, of the shape of ``like``, from a CPU generator."""
        uniform = torch.rand(like.shape, generator=generator).to(like) - 0.5
        # Rounding to -0.5 would make it infinite.
        inside = (1.0 - 2.0 * uniform.abs()).clamp_min(1e-7)
        return -self.deviation / math.sqrt(2.0) * uniform.sign() * inside.log()
