"""Numbers on a device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(
    values: tuple[float, ...] | tuple[tuple[float, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return numbers as a tensor that is copied to a device once, and must not be changed.

    A GPU waits for each copy from the host, and cannot replay it.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
