"""Patches as the solution of linear equations: the projection's gradient is ``G^T X``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANK = 1e-6
"""Singular values below this share of the largest count as zero: float32 resolves no smaller."""

_ROUNDING = 1e-12
_REWEIGHTED = 3


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Patches that solve ``W = G^T X`` in the least-squares sense.

    Attributes
    ----------
    patches
        float64 ``(N, P)``, in what the model sees.
    residual
        ``|G^T X - W|^2 / |W|^2`` over the equations that count.
    rank, equations, unknowns
        Of the system that each pixel of the patches solves: ``rank`` of ``unknowns`` N.
    condition
        Largest over smallest singular value of G, of those within the rank.
    error
        Expected root mean squared error of ``patches``, from the residual, the degrees of freedom
        that it had and the singular values; infinite where there was none.
    """

    patches: Tensor
    residual: float
    rank: int
    equations: int
    unknowns: int
    condition: float
    error: float

    @property
    def determined(self) -> bool:
        """Whether the equations fix every patch, with some to spare that check it."""
        return self.rank == self.unknowns < self.equations


def solve_patches(
    slopes: Tensor,
    weight: Tensor,
    *,
    around: Tensor,
    slope_trust: Tensor | None = None,
    weight_trust: Tensor | None = None,
) -> Solution:
    """Solve for the patches of one image.

    A patch x_n becomes the token ``z_n = E x_n + e + p_n``. With ``G[n] = dL/dz_n``, the gradient
    of ``p_n``, that of E is ``W = sum_n G[n] x_n^T``: D equations for each of the P columns of X.

    Parameters
    ----------
    slopes, weight
        G ``(N, D)`` and W ``(D, P)``, float64.
    around
        What patches are nearest to where the equations leave them open, ``(P,)``.
    slope_trust, weight_trust
        Trust in [0, 1] in each value of G and W, or None; an equation counts by the variance that
        both leave in it, and one with a value of no trust counts nothing.
    """
    right = weight - slopes.sum(dim=0)[:, None] * around
    if slope_trust is None and weight_trust is None:
        patches, counted = _least_norm(slopes, right), torch.ones_like(weight)
    else:
        patches, counted = _reweighted(slopes, right, around, slope_trust, weight_trust)
    apart = counted.sqrt() * (slopes.T @ patches - right)
    size = (counted * weight.square()).sum()
    values = torch.linalg.svdvals(slopes)
    rank = int((values > RANK * values[0]).sum()) if bool(values[0] > 0) else 0
    equations = int((counted > 0).sum(dim=0).median())
    spare = (equations - rank) * weight.shape[1]
    within = values[: max(rank, 1)]
    error = float("inf")
    if spare > 0:
        deviation = apart.square().sum() / spare / counted.mean().clamp_min(1e-300)
        error = float((deviation * within.pow(-2).sum() / len(slopes)).sqrt())
    return Solution(
        patches=patches + around,
        residual=float(apart.square().sum() / size.clamp_min(1e-300)),
        rank=rank,
        equations=equations,
        unknowns=len(slopes),
        condition=float(within[0] / within[-1]),
        error=error,
    )


def _least_norm(slopes: Tensor, right: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.lstsq(slopes.T, right, rcond=RANK, driver="gelsd").solution
    return solution


def _reweighted(
    slopes: Tensor,
    right: Tensor,
    around: Tensor,
    slope_trust: Tensor | None,
    weight_trust: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weigh each equation by what its values leave open at the patches found so far."""
    own = _variance(weight_trust, right)
    carried = _variance(slope_trust, slopes)
    squares = torch.ones(len(slopes), right.shape[1], dtype=slopes.dtype)
    patches = counted = torch.empty(0)
    for _ in range(_REWEIGHTED):
        counted = 1.0 / (_ROUNDING + own + carried.T @ squares)
        counted = counted / counted.max().clamp_min(1e-300)
        patches = torch.stack(
            [
                _least_norm(slopes * root, (right[:, j] * root)[:, None])[:, 0]
                for j, root in enumerate(counted.sqrt().T)
            ],
            dim=1,
        )
        squares = (patches + around).square().clamp(max=10.0)
    return patches, counted


def _variance(trust: Tensor | None, like: Tensor) -> Tensor:
    """Variance of values in units of the error that halves trust; very large without any."""
    if trust is None:
        return torch.zeros_like(like)
    return 1.0 / trust.clamp(1e-12, 1.0) - 1.0
