"""One number of a tensor that shows whether another one is equal to it."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_AT_ONCE = 1 << 20
_WAVE = 1 << 16
_STEP = 2.4


def projection(value: Tensor) -> float:
    """Return the inner product of a tensor, in one row, with a fixed vector of length about 1.

    Tensors whose difference is d are apart in it by about ``|d| / sqrt(n)`` of n values. Of complex
    values real and imaginary parts are taken in turn.
    """
    held = value.detach()
    flat = (torch.view_as_real(held) if held.is_complex() else held).reshape(-1)
    total, place = 0.0, 0
    for at in range(0, flat.numel(), _AT_ONCE):
        for part in flat[at : at + _AT_ONCE].to("cpu", torch.float64).split(_WAVE):
            # cos(a + b) of places that begin anew: each wave is computed once.
            cosine, sine = (_waves()[:, : len(part)] @ part).tolist()
            begin = 1.0 + _STEP * place
            total += math.cos(begin) * cosine - math.sin(begin) * sine
            place += len(part)
    return total * math.sqrt(2.0 / max(flat.numel(), 1))


@lru_cache(maxsize=1)
def _waves() -> Tensor:
    """Return cosines and sines of the first places, float64 ``(2, _WAVE)``."""
    angles = _STEP * torch.arange(_WAVE, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()])
