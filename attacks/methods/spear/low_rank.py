"""Low-rank gradients of linear layers: their subspaces, and their factors from sparse vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.reading.spectrum import OVER_EDGE, Spectrum

_SAFETY = 12.0
"""Deviations of the noise that an entry has to exceed to count as other than zero."""

_ABOVE = 8.0
_ROUNDING = 1e-12
_FITS = 3


@dataclass(frozen=True)
class Subspace:
    """Column space and row space of a layer's gradient, all float64.

    Attributes
    ----------
    rows
        The gradient's rows that are not zero, ``(m, n)``.
    live
        Rows of the gradient that are not zero, bool ``(M,)``; the others have no row in ``left``.
    left, values, right
        Thin singular value decomposition to rank N: ``(m, N)``, ``(N,)``, ``(N, n)``.
    noise
        Root mean square of what the first N singular values leave of each row, ``(m,)``.
    rest
        Norm of what they leave of all rows.
    """

    rows: Tensor
    live: Tensor
    left: Tensor
    values: Tensor
    right: Tensor
    noise: Tensor
    rest: Tensor

    @classmethod
    def of(cls, gradient: Tensor, most: int) -> Subspace:
        """Decompose a gradient ``(M, n)`` of at most ``most`` examples.

        The noise is that of the singular values behind the ``most`` first, which exact arithmetic
        would make zero; those that do not exceed what such noise makes are left out.
        """
        live = gradient.abs().amax(dim=1) > 0
        rows = gradient[live].to(torch.float64)
        seen = Spectrum.of(rows)
        m, n = rows.shape
        tail = seen.values[most:]
        noise = float(tail.square().sum().sqrt()) / math.sqrt(max(1, (m - most) * (n - most)))
        rounding = torch.finfo(torch.float64).eps * max(m, n)
        rank = seen.rank(share=rounding, floor=_ABOVE * seen.edge(noise), most=most)
        rest = (seen.left[:, most:] * tail).square().sum(dim=1) / max(1, n - most)
        own = rest.sqrt().clamp_min(0.5 * noise)
        return cls._cut(rows, live, seen, rank, own, tail.norm())

    @classmethod
    def under(cls, gradient: Tensor, most: int, deviation: float) -> Subspace:
        """Decompose a gradient ``(M, n)`` of at most ``most`` examples under known white noise.

        Singular values that do not exceed what noise alone makes (`Spectrum.edge`) are left out. No
        row counts as zero.
        """
        rows = gradient.to(torch.float64)
        seen = Spectrum.of(rows)
        # What is sent is float32, so that no number is known better than to its rounding.
        rounding = float(rows.norm()) * torch.finfo(torch.float32).eps / math.sqrt(rows.numel())
        deviation = max(deviation, rounding)
        rank = seen.rank(floor=OVER_EDGE * seen.edge(deviation), most=most)
        live, noise = torch.ones(len(rows), dtype=torch.bool), seen.values.new_tensor(deviation)
        return cls._cut(rows, live, seen, rank, noise.expand(len(rows)), seen.values[rank:].norm())

    @classmethod
    def _cut(
        cls, rows: Tensor, live: Tensor, seen: Spectrum, rank: int, noise: Tensor, rest: Tensor
    ) -> Subspace:
        left = seen.left[:, :rank].contiguous()
        return cls(rows, live, left, seen.values[:rank], seen.right[:rank], noise, rest)

    @property
    def deviation(self) -> float:
        """Root mean square of the noise over all rows."""
        return float(self.noise.square().mean().sqrt())

    @property
    def rank(self) -> int:
        """Number N of singular values above the noise."""
        return len(self.values)

    @property
    def inputs(self) -> Tensor:
        """Row space as ``(N, n)``: the gradient is ``left @ inputs``, to its noise."""
        return self.values[:, None] * self.right

    def noise_of(self, coefficients: Tensor) -> Tensor:
        """Most that noise makes of the entries of ``left @ c``, for ``c`` ``(..., N)``."""
        length = (coefficients / self.values).norm(dim=-1, keepdim=True)
        most: Tensor = _SAFETY * self.noise * length + _ROUNDING
        return most


@dataclass(frozen=True)
class Direction:
    """A sparse vector ``left @ coefficients`` of a subspace, and what is known of its input.

    Attributes
    ----------
    coefficients
        Unit vector ``(N,)``.
    zeros
        Which entries are surely zero, bool ``(m,)``; those near the noise are not.
    dual
        ``(N,)``: the input that goes with it is about ``dual @ inputs``.
    """

    coefficients: Tensor
    zeros: Tensor
    dual: Tensor


def factors(space: Subspace, found: Sequence[Direction]) -> tuple[Tensor, Tensor]:
    """Return what entered the layer and the loss' gradient of what left it.

    ``found`` holds every sparse vector of the gradient's column space.

    The last column of the gradient is the bias', into which every example enters as 1: that fixes
    the scales. Entries known to be zero are left out, then both factors are fitted to the gradient
    in turn.

    Returns
    -------
    tuple of Tensor
        float64 ``(N, n - 1)`` and ``(N, m)``.
    """
    entries = ~torch.stack([d.zeros for d in found])
    rows = torch.stack([d.coefficients for d in found]) @ space.left.T * entries
    for _ in range(_FITS):
        inputs = torch.linalg.lstsq(rows.T, space.rows).solution
        inputs = inputs / inputs[:, -1:]
        rows = _fitted(inputs, space.rows, entries)
    scaled = torch.linalg.lstsq(rows.T, space.rows[:, :-1]).solution
    return scaled, rows


def _fitted(inputs: Tensor, gradient: Tensor, entries: Tensor) -> Tensor:
    """Least squares for ``(N, m)`` of ``rows^T @ inputs = gradient``, zero outside ``entries``."""
    products, right = inputs @ inputs.T, inputs @ gradient.T
    both = entries.T[:, :, None] & entries.T[:, None, :]
    unit = torch.diag_embed((~entries.T).to(products.dtype))
    system = torch.where(both, products, 0.0) + unit * products.diagonal()
    solved: Tensor = torch.linalg.solve(system, (right * entries).T[:, :, None])[:, :, 0]
    return solved.T * entries
