"""Singular values of a matrix, and how many of them count.

Attacks decompose matrices here alone: what counts as rounding or as noise has one rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

OVER_EDGE = 1.02
"""Least singular value that counts under noise, in the largest that noise alone makes."""


@dataclass(frozen=True)
class Spectrum:
    """Thin singular value decomposition ``left diag(values) right``, float64.

    Attributes
    ----------
    left, values, right
        Of a matrix ``(m, n)``: ``(m, k)``, ``(k,)``, the largest first, and ``(k, n)``, with k the
        smaller of m and n.
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Spectrum:
        """Decompose a matrix ``(m, n)``."""
        return cls(*torch.linalg.svd(matrix.double(), full_matrices=False))

    @property
    def largest(self) -> float:
        """Largest singular value; 0 of a matrix without rows."""
        return float(self.values[0]) if len(self.values) else 0.0

    def edge(self, deviation: float) -> float:
        """Return the largest singular value that white noise alone makes.

        That is ``deviation (sqrt m + sqrt n)``, the edge of Marchenko and Pastur's law.
        """
        sides = (len(self.left), self.right.shape[1])
        return deviation * sum(math.sqrt(side) for side in sides)

    def rank(self, *, share: float = 0.0, floor: float = 0.0, most: int | None = None) -> int:
        """Return how many values are above a share of the largest and above a floor.

        Parameters
        ----------
        most
            Values beyond the first ``most`` are not counted; None counts all.
        """
        return int((self.values[:most] > max(share * self.largest, floor)).sum())

    def holds(self, rank: int, share: float, of: int = 1) -> bool:
        """Return whether value number ``rank`` is there, above a share of value number ``of``."""
        return rank <= len(self.values) and bool(
            self.values[rank - 1] > share * self.values[of - 1]
        )


def independent(rows: Tensor, least: float) -> bool:
    """Return whether rows ``(k, n)``, k at most n, have no singular value of ``least`` or less."""
    return float(torch.linalg.svdvals(rows)[-1]) > least


def complement(rows: Tensor) -> Tensor:
    """Return orthonormal rows ``(n - k, n)`` that are orthogonal to independent rows ``(k, n)``."""
    found: Tensor = torch.linalg.svd(rows, full_matrices=True)[2][len(rows) :]
    return found


def shortened_most(matrix: Tensor) -> Tensor:
    """Return the unit vector ``(n,)`` that a matrix ``(m, n)`` maps to the shortest one."""
    found: Tensor = torch.linalg.svd(matrix, full_matrices=True)[2][-1]
    return found
