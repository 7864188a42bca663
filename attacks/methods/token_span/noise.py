"""Rows of an embedding's gradient that hold more than noise."""

from __future__ import annotations

import torch
from torch import Tensor

_OUTLYING = 8.0
"""Median deviations above the median from which on a row is no noise: one in ten million is."""


def rows_that_stand_out(gradient: Tensor) -> Tensor:
    """Return the rows ``(N, width)`` of a gradient that hold more than zeros, or than noise, int64.

    Noise is known by itself: the norms of its rows are all alike, but for those of few tokens.
    """
    norms: Tensor = gradient.double().norm(dim=1)
    middle = float(norms.median())
    if middle == 0.0:
        return (norms > 0.0).nonzero().flatten()
    spread = float((norms - middle).abs().median())
    alike = spread < 2.0 * middle / (2.0 * gradient.shape[1]) ** 0.5
    found: Tensor = (norms > middle + _OUTLYING * spread).nonzero().flatten()
    return found if alike else torch.arange(len(norms))
