"""Tell tokens whose embeddings lie in a subspace from others."""

from __future__ import annotations

from torch import Tensor

_APART = 5.0
"""Ratio of neighbouring distances from which on they separate tokens that are there from others."""


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
