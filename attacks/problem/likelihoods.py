"""Negative log-likelihoods of an upload, in nats, for defenses that add noise.

Each is an objective (`bract.attacks.problem.objectives.Objective`): ``captured`` is the upload u,
``simulated`` what would have been sent without the noise, m(x), for candidate images x. What does
not depend on x is left out. Coordinate weights are trust, which a likelihood has no place for:
they multiply a coordinate's term where they are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from bract.attacks.problem.objectives import Objective, weighted_sum
from bract.updates.update import Tensors


@runtime_checkable
class Likelihood(Objective, Protocol):
    """A law of noise as an objective."""

    def tempered(self) -> Likelihood:
        """Return the law as a first-order search through kinks can use it; see `Tempered`."""


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
    power: ClassVar[int] = 2

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        factor = 0.5 / self.deviation**2
        return factor * weighted_sum(lambda s, c: (s - c).square(), simulated, captured, weights)

    def tempered(self) -> Tempered:
        """Return the law as a first-order search through kinks can use it."""
        return Tempered(self)

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
    power: ClassVar[int] = 1

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        factor = math.sqrt(2.0) / self.deviation
        return factor * weighted_sum(lambda s, c: (s - c).abs(), simulated, captured, weights)

    def tempered(self) -> Tempered:
        """Return the law as a first-order search through kinks can use it."""
        return Tempered(self)

    def draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise of this law, of the shape of ``like``, from a CPU generator."""
        uniform = torch.rand(like.shape, generator=generator).to(like) - 0.5
        # Rounding to -0.5 would make it infinite.
        inside = (1.0 - 2.0 * uniform.abs()).clamp_min(1e-7)
        return -self.deviation / math.sqrt(2.0) * uniform.sign() * inside.log()


@dataclass(frozen=True)
class Tempered:
    """A law of noise, the noise taken for no less than a share of what was captured.

    Where there is hardly any noise its likelihood outweighs every prior. Behind units with kinks a
    first-order search does not come near such a match, and is left without the prior it needs.

    Attributes
    ----------
    share
        Of the root mean square of the captured tensors: the least deviation. Chosen on images and
        networks that are not scored, of 0.05, 0.2 and 0.5, through the strided LeNet with ReLU;
        ``experiments.prior --kind flow --data photos`` scores it on clipped uploads. Through
        sigmoids every such share lost.
    """

    law: GaussianLikelihood | LaplaceLikelihood
    share: float = 0.2
    component: ClassVar[str] = "tempered likelihood"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        count = sum(value[0].numel() for value in captured.values())
        energy = weighted_sum(lambda _, c: c.square(), simulated, captured, None)
        least = self.share * (energy / count).sqrt()
        warmth = (self.law.deviation / least.clamp_min(1e-30)).clamp_max(1.0)
        return self.law(simulated, captured, weights) * warmth**self.law.power

    def tempered(self) -> Tempered:
        """Return itself."""
        return self
