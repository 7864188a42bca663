"""Weak knowledge of images: neighbouring pixels, and channels, are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks.methods.pooled_places.equations import Equations

COLOUR = 4.0
"""Weight of differences of colours, in that of grey values: natural images change less in them."""

_EDGE = 1e-2


@dataclass(frozen=True)
class Roughness:
    """Weighted squares of differences of pixels below and beside each other.

    Of three channels they are of the mean and, by `COLOUR`, of red less green and of both less
    blue; of other numbers each channel's own.

    Attributes
    ----------
    mixed
        ``(C, C)``: kinds of differences by channel.
    one, other
        Places of the two pixels of each difference, ``(D,)``.
    weights
        ``(C, D)``.
    """

    mixed: Tensor
    one: Tensor
    other: Tensor
    weights: Tensor

    @classmethod
    def at(cls, values: Tensor, shape: Sequence[int], weight: float) -> Roughness:
        """Return the squares that are the sum of absolute differences at a map ``(N,)``."""
        channels, height, width = shape
        at = torch.arange(height * width).view(height, width)
        one = torch.cat([at[1:].flatten(), at[:, 1:].flatten()])
        other = torch.cat([at[:-1].flatten(), at[:, :-1].flatten()])
        mixed = torch.eye(channels, dtype=values.dtype)
        if channels == 3:
            mixed = torch.tensor([[1, 1, 1], [1, -1, 0], [1, 1, -2]], dtype=values.dtype)
            mixed = mixed / mixed.norm(dim=1, keepdim=True)
            mixed[1:] *= COLOUR
        made = cls(mixed, one, other, torch.ones(channels, len(one), dtype=values.dtype))
        return replace(made, weights=weight * (made._apart(values).square() + _EDGE**2).rsqrt())

    def __call__(self, values: Tensor) -> float:
        """Return the sum for a map ``(N,)``."""
        return float((self.weights * self._apart(values).square()).sum())

    def normal(self, count: int) -> Tensor:
        """Return the matrix ``(N, N)`` of the quadratic form, N being ``count``."""
        channels = len(self.mixed)
        pixels = count // channels
        kinds = self.weights.new_zeros(channels, pixels, pixels)
        for kind, weights in zip(kinds, self.weights, strict=True):
            for row, column, sign in (
                *((self.one, self.one, 1), (self.other, self.other, 1)),
                *((self.one, self.other, -1), (self.other, self.one, -1)),
            ):
                kind.index_put_((row, column), sign * weights, accumulate=True)
        found = torch.einsum("kc,kd,kij->cidj", self.mixed, self.mixed, kinds)
        return found.reshape(count, count)

    def _apart(self, values: Tensor) -> Tensor:
        mixed = self.mixed @ values.view(len(self.mixed), -1)
        return mixed[:, self.one] - mixed[:, self.other]


@dataclass(frozen=True)
class Tied:
    """Equations for one value ``(H * W,)`` a pixel, of which each channel is an affine function.

    Attributes
    ----------
    equations
        For the whole map ``(C * H * W,)``.
    scale, offset
        Of each channel, ``(C,)``.
    """

    equations: Equations
    scale: Tensor
    offset: Tensor

    @property
    def highest(self) -> Tensor:
        """As `Equations.highest`."""
        return self.equations.highest

    @property
    def trust(self) -> Tensor:
        """As `Equations.trust`."""
        return self.equations.trust

    def whole(self, values: Tensor) -> Tensor:
        """Return the map of all channels."""
        return (self.scale[:, None] * values + self.offset[:, None]).flatten()

    def outputs(self, values: Tensor) -> Tensor:
        """As `Equations.outputs`."""
        return self.equations.outputs(self.whole(values))

    def errors(self, values: Tensor, width: float) -> Tensor:
        """As `Equations.errors`."""
        return self.equations.errors(self.whole(values), width)

    def left(self, values: Tensor) -> float:
        """As `Equations.left`."""
        return self.equations.left(self.whole(values))

    def linearised(self, values: Tensor, width: float) -> tuple[Tensor, Tensor]:
        """As `Equations.linearised`, by one value a pixel."""
        errors, jacobian = self.equations.linearised(self.whole(values), width)
        by_channel = jacobian.view(len(errors), len(self.scale), -1)
        return errors, torch.einsum("ecn,c->en", by_channel, self.scale)
