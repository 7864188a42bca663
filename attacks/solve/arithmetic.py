"""Arithmetic of devices, and the errors that say their memory is full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the machine ran out of memory."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in text for sign in ("out of memory", "can't allocate memory", "not enough memory")
    )


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Full float32 products and deterministic kernels: matching needs every bit of a gradient."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
