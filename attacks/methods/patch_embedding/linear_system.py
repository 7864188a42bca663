"""Patches as the solution of linear equations: the projection's gradient is ``G^T X``.

A patch x_n becomes the token ``z_n = E x_n + e + p_n``. With ``G[n] = dL/dz_n``, which is the
gradient of the position p_n, the gradient of E is ``W = sum_n G[n] x_n^T``: D equations for each of
the P columns of X.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.problem.linear_layers import Projection
from bract.attacks.reading.spectrum import Spectrum

RANK = 1e-6
"""Singular values below this share of the largest count as zero: float32 resolves no smaller."""

_STEPS = 1000
_TOLERANCE = 1e-10
_JITTER = 1e-13


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Patches that solve the equations in the least-squares sense.

    Attributes
    ----------
    patches
        float64 ``(N, P)``, in what the model sees; of least norm where the equations leave some
        open.
    residual
        ``|G^T X - W|^2 / |W|^2``.
    rank, unknowns, equations
        Of the system that every column of X solves: at most ``unknowns`` N.
    condition
        Largest over smallest singular value of G, of those within the rank.
    error
        Expected root mean squared error of ``patches`` by the residual and the singular values;
        infinite where no equation is left to check them.
    """

    patches: Tensor
    residual: float
    rank: int
    unknowns: int
    equations: int
    condition: float
    error: float

    @property
    def determined(self) -> bool:
        """Return whether the equations fix every patch, with some to spare that check it."""
        return self.rank == self.unknowns < self.equations


def solve_patches(slopes: Tensor, weight: Tensor) -> Solution:
    """Solve for the patches of one image, each value of the equations as good as the next.

    Parameters
    ----------
    slopes, weight
        G ``(N, D)`` and W ``(D, P)``, float64.
    """
    seen = Spectrum.of(slopes)
    rank = seen.rank(share=RANK)
    inverse = 1.0 / seen.values[:rank]
    patches = seen.left[:, :rank] @ (inverse[:, None] * (seen.right[:rank] @ weight))
    apart = float((slopes.T @ patches - weight).square().sum())
    spare = slopes.shape[1] - rank
    variance = apart / (spare * weight.shape[1]) if spare else float("inf")
    return Solution(
        patches=patches,
        residual=apart / max(float(weight.square().sum()), 1e-300),
        rank=rank,
        unknowns=len(slopes),
        equations=slopes.shape[1],
        condition=seen.largest / max(float(seen.values[max(rank, 1) - 1]), 1e-300),
        error=float((variance * inverse.square().sum() / len(slopes)) ** 0.5),
    )


@dataclass(frozen=True, kw_only=True)
class OpenSystem:
    """The equations of an image where a defense left their values uncertain.

    An equation counts by the inverse of the variance that its values leave in it, and neighbouring
    pixels are alike: ``sum c (G^T X - W)^2 + s |D u|^2`` over the pixels u, with D the differences
    of neighbours, fills in what the equations hardly fix.

    Attributes
    ----------
    slopes, weight
        G ``(N, D)`` and W ``(D, P)``, float64.
    slope_variance, weight_variance
        Variances of their values, of the same shapes, positive.
    mean, std
        Normalisation of each pixel of a patch, ``(P,)``: the model saw ``(u - mean) / std``.
    """

    slopes: Tensor
    weight: Tensor
    slope_variance: Tensor
    weight_variance: Tensor
    mean: Tensor
    std: Tensor
    projection: Projection
    shape: tuple[int, int, int]

    def counted(self, patches: Tensor | None = None) -> Tensor:
        """Weight of each equation ``(D, P)``, 1 at most, at patches ``(N, P)`` or at any."""
        squares = (
            torch.ones(len(self.slopes), self.weight.shape[1]).to(self.slopes)
            if patches is None
            else patches.square()
        )
        counted = 1.0 / (self.weight_variance + self.slope_variance.T @ squares)
        return counted / counted.max()

    def solve(self, smoothness: float, counted: Tensor, start: Tensor | None = None) -> Tensor:
        """Return the pixels ``(C, H, W)`` in float64 by preconditioned conjugate gradients.

        Parameters
        ----------
        smoothness
            s, as a share of the mean diagonal of the equations' own matrix.
        start
            Pixels to begin at; grey without any.
        """
        scaled = self.slopes[None] * counted.T[:, None].sqrt() / self.std[:, None, None]
        blocks = scaled @ scaled.transpose(1, 2)
        size = float(blocks.diagonal(dim1=1, dim2=2).mean())
        held = smoothness * size
        # Of a column that nothing is known of, neighbours alone say something.
        own = _JITTER * blocks.diagonal(dim1=1, dim2=2).amax(dim=1) + 4.0 * held
        identity = torch.eye(len(self.slopes)).to(blocks)
        factors = torch.linalg.cholesky(blocks + own[:, None, None] * identity)

        def applied(pixels: Tensor) -> Tensor:
            rows = self.projection.patches(pixels)
            back = torch.einsum("pnm,mp->np", blocks, rows)
            return self._spread(back) + held * _roughness(pixels)

        def preconditioned(pixels: Tensor) -> Tensor:
            rows = self.projection.patches(pixels).T[..., None]
            return self._spread(torch.cholesky_solve(rows, factors)[..., 0].T)

        wanted = self.weight + self.slopes.sum(dim=0)[:, None] * (self.mean / self.std)
        right = self._spread(self.slopes @ (counted * wanted) / self.std)
        grey = torch.full(self.shape, 0.5).to(self.slopes)
        return _conjugate_gradients(
            applied, preconditioned, right, grey if start is None else start
        )

    def patches(self, pixels: Tensor) -> Tensor:
        """Return what the model sees of pixels ``(C, H, W)``: ``(N, P)``."""
        return (self.projection.patches(pixels) - self.mean) / self.std

    def _spread(self, patches: Tensor) -> Tensor:
        """Add patches up into pixels: the transpose of taking patches."""
        flat = patches.new_zeros(self.shape).flatten()
        places = self.projection.pixels.to(patches.device).flatten()
        inside = places >= 0
        flat.index_add_(0, places[inside], patches.flatten()[inside])
        return flat.view(self.shape)


def _roughness(pixels: Tensor) -> Tensor:
    """Return ``D^T D u`` for the differences of neighbouring pixels."""
    found = torch.zeros_like(pixels)
    for axis in (-1, -2):
        apart = pixels.diff(dim=axis)
        count = pixels.shape[axis]
        found.narrow(axis, 1, count - 1).add_(apart)
        found.narrow(axis, 0, count - 1).sub_(apart)
    return found


def _conjugate_gradients(
    applied: Callable[[Tensor], Tensor],
    preconditioned: Callable[[Tensor], Tensor],
    right: Tensor,
    start: Tensor,
) -> Tensor:
    """Solve ``A u = b`` for a symmetric positive A."""
    found = start.clone()
    residual = right - applied(found)
    direction = ahead = preconditioned(residual)
    product = (residual * ahead).sum()
    goal = _TOLERANCE**2 * float((right * preconditioned(right)).sum())
    for _ in range(_STEPS):
        if not float(product) > goal:
            break
        moved = applied(direction)
        step = product / (direction * moved).sum().clamp_min(1e-300)
        found = found + step * direction
        residual = residual - step * moved
        ahead = preconditioned(residual)
        product, before = (residual * ahead).sum(), product
        direction = ahead + (product / before) * direction
    return found
