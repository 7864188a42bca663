"""How much memory a piece of work takes at its height."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass
class Peak:
    """Bytes that a piece of work held at most beyond what was held before; None if unknown.

    Those of the CUDA device where one is named, else of this process.
    """

    bytes: int | None = None


@contextmanager
def watched_memory(device: str = "cpu") -> Iterator[Peak]:
    """Measure the peak of what runs within; it is known once that ends, however it ends.

    Parameters
    ----------
    device
        ``cpu``, or ``cuda`` or ``cuda:N``. On systems other than Linux the peak of a process is
        not known.
    """
    peak = Peak()
    if device.startswith("cuda"):
        import torch

        torch.cuda.init()  # before that there is no peak to reset
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            yield peak
        finally:
            peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    resident = _reset()
    try:
        yield peak
    finally:
        if resident is not None:
            peak.bytes = max(0, _status("VmHWM") - resident)


def _reset() -> int | None:
    """Begin a new peak; return what is resident, or None where that cannot be had.

    What the allocator keeps of freed memory is given back first: work that used it again would seem
    to need none.
    """
    with suppress(OSError, AttributeError):  # a function of glibc alone
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESET.write_text(_RESET_PEAK)
        _status("VmHWM")
        return _status("VmRSS")
    except (OSError, StopIteration, ValueError):
        return None


def _status(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
