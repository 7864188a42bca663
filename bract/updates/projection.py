"""One number of a tensor that shows whether another one is equal to it."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_AT_ONCE = 1 << 20
_ROW = 1 << 12
"""Places of which the fixed vector is computed once; it turns by an angle from row to row."""

_FIRST, _STEP = 1.0, 2.4


def projection(value: Tensor) -> float:
    """Return the inner product of a tensor, in one row, with a fixed vector of length about 1.

    Tensors whose difference is d are apart in it by about ``|d| / sqrt(n)`` of n values. Of complex
    values real and imaginary parts are taken in turn.
    """
    held = value.detach()
    flat = (torch.view_as_real(held) if held.is_complex() else held).reshape(-1)
    total, count = 0.0, flat.numel()
    for at in range(0, count, _AT_ONCE):
        part = flat[at : at + _AT_ONCE].to("cpu", torch.float64)
        whole = len(part) // _ROW * _ROW
        rows = part[:whole].view(-1, _ROW) @ _waves()
        turns = _STEP * torch.arange(at, at + whole, _ROW, dtype=torch.float64)
        total += float((rows[:, 0] * torch.cos(turns) - rows[:, 1] * torch.sin(turns)).sum())
        places = torch.arange(at + whole, at + len(part), dtype=torch.float64)
        total += float((part[whole:] * torch.cos(_FIRST + _STEP * places)).sum())
    return total * math.sqrt(2.0 / max(count, 1))


@lru_cache(maxsize=1)
def _waves() -> Tensor:
    """Return cosine and sine at the places of the first row, float64 ``(places, 2)``."""
    angles = _FIRST + _STEP * torch.arange(_ROW, dtype=torch.float64)
    return torch.stack([torch.cos(angles), torch.sin(angles)], dim=1)
