"""Subspaces that gradients of linear layers span, and distances to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.errors import BractError

_GAP = 30.0
"""Ratio of neighbouring singular values from which on the smaller one counts as rounding."""

_ROUNDING = 1e-8
"""Singular value, as a share of the largest, below which float32 gradients hold nothing."""

_APART = 5.0
"""Ratio of neighbouring distances from which on they separate tokens that are there from others."""


@dataclass(frozen=True)
class Span:
    """Subspace of a layer's input space.

    Attributes
    ----------
    basis
        Orthonormal rows, float64 ``(rank, width)``.
    gap
        Ratio of the smallest singular value that was kept to the largest that was dropped.
    """

    basis: Tensor
    gap: float

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return len(self.basis)

    @property
    def full(self) -> bool:
        """Whether every vector lies in it, so that it tells nothing."""
        return self.rank >= self.basis.shape[1]

    def distance(self, inputs: Tensor) -> Tensor:
        """Return the share in [0, 1] of the norm of inputs ``(..., width)`` outside of it."""
        basis = self.basis.to(inputs.dtype)
        outside = inputs - (inputs @ basis.T) @ basis
        share: Tensor = outside.norm(dim=-1) / inputs.norm(dim=-1).clamp_min(1e-30)
        return share


def span_of(gradients: Sequence[Tensor], rounding: Sequence[float] = ()) -> Span:
    """Return the span of the rows of gradients ``(outputs, width)`` with one common input.

    The gradient of ``Y = X W^T`` is ``D^T X``: its rows lie in the span of the inputs X, and span
    it where the output gradients D of the tokens are independent (DAGER, Petrov et al., NeurIPS
    2024, theorem 5.1). The rank is where singular values fall to rounding.

    Parameters
    ----------
    rounding
        Standard deviation of each gradient's entries by rounding: what is left of a step of float32
        weights. Singular values that such noise makes are dropped.

    Raises
    ------
    BractError
        If the values do not fall: noise, or at least as many tokens as dimensions.
    """
    kept = [i for i, g in enumerate(gradients) if bool(g.any())]
    if not kept:
        raise BractError(
            "the gradient of the first linear layers is zero; of adapters it is until their second "
            "factor has been trained"
        )
    rows = [gradients[i].double() for i in kept]
    known = [rounding[i] for i in kept if i < len(rounding) and rounding[i] > 0.0]
    if len(known) == len(rows):
        # Rounding then has the deviation 1 in all of them.
        joined = torch.cat([g / deviation for g, deviation in zip(rows, known, strict=True)])
        floor = sum(side**0.5 for side in joined.shape)
    else:
        joined = torch.cat([g / g.norm() for g in rows])
        floor = 0.0
    _, values, basis = torch.linalg.svd(joined, full_matrices=False)
    held = values.clamp_min(max(_ROUNDING * float(values[0]), floor))
    ratios = held[:-1] / held[1:]
    falls = (ratios >= _GAP).nonzero().flatten().tolist()
    above = int((values > floor).sum())
    if not falls and floor > 0.0 and 0 < above < basis.shape[1]:
        return Span(basis[:above], _GAP)
    if not falls:
        if len(values) < basis.shape[1]:
            return Span(basis, float("inf"))
        raise BractError(
            "the singular values of the first linear layers do not fall to rounding: noise, or at "
            f"least as many tokens as the {basis.shape[1]} dimensions of an embedding"
        )
    rank = falls[-1] + 1
    return Span(basis[:rank], float(ratios[rank - 1]))


def separating(distances: Tensor, most: int) -> float | None:
    """Return a distance that separates what lies in a subspace from what does not; None if none.

    Chosen without the truth: the middle, on a logarithmic scale, of the widest gap among the
    ``most`` smallest distances.
    """
    smallest = distances.flatten().topk(min(most, distances.numel()), largest=False).values
    ordered = smallest.sort().values.clamp_min(1e-9)
    if len(ordered) < 2:
        return None
    ratios = ordered[1:] / ordered[:-1]
    at = int(ratios.argmax())
    if float(ratios[at]) < _APART:
        return None
    return float((ordered[at] * ordered[at + 1]).sqrt())
