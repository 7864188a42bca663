"""Memory that a process has freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes

SMALLEST = 1 << 20
"""Bytes from which on a block's memory is returned as soon as it is freed."""

_M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Have the C library return the memory of each large block to the system once it is freed.

    glibc keeps freed blocks of up to 32 MB for later, and a model's tensors or parts of every round
    leave gaps among them: a process then holds twice what it uses. Other C libraries are left as
    they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, SMALLEST)
