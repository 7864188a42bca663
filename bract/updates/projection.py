"""One number of a tensor that shows whether another one is equal to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_AT_ONCE = 1 << 20


def projection(value: Tensor) -> float:
    """Return the inner product of a tensor, in one row, with a fixed vector of length about 1.

    Tensors whose difference is d are apart in it by about ``|d| / sqrt(n)`` of n values.
    """
    flat = value.detach().reshape(-1)
    total, count = 0.0, flat.numel()
    for at in range(0, count, _AT_ONCE):
        part = flat[at : at + _AT_ONCE].to("cpu", torch.float64)
        places = torch.arange(at, at + len(part), dtype=torch.float64)
        total += float((part * torch.cos(1.0 + 2.4 * places)).sum())
    return total * math.sqrt(2.0 / max(count, 1))
