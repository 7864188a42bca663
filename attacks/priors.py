"""What an attacker believes about images before any gradient, one number a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bract.attacks.problem import Problem


class Prior(Protocol):
    """A penalty on candidate images."""

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``(L,)`` for images ``(L, B, C, H, W)`` in [0, 1]; lower is more plausible."""


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    """Mean absolute (or squared) difference of neighbouring pixels, rows plus columns.

    Attributes
    ----------
    weight
        Factor before the penalty.
    power
        1 as in IG, 2 as in GRNN's published code.
    """

    weight: float
    power: int = 1

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * (mean |dx|^power + mean |dy|^power)``."""
        del problem
        down = images[..., 1:, :] - images[..., :-1, :]
        right = images[..., :, 1:] - images[..., :, :-1]
        if self.power == 1:
            down, right = down.abs(), right.abs()
        else:
            down, right = down.abs() ** self.power, right.abs() ** self.power
        return self.weight * (down.flatten(1).mean(dim=1) + right.flatten(1).mean(dim=1))


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """Squared distance of pixels to [0, 1], for searches that are not boxed."""

    weight: float

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * mean(distance^2)``."""
        del problem
        outside = (images - images.clamp(0.0, 1.0)).square()
        return self.weight * outside.flatten(1).mean(dim=1)
