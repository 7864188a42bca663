"""Flower's clock in a federation on one machine goes on evenly, whatever the machine's is set to.

Flower counts the life of tokens, nodes and messages by the machine's clock: set forward by two
minutes, it would end a run. The processes of one machine share the kernel's monotonic clock, and
the start of that clock that they are given.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

from bract.deploy.rules import replace
from bract.flower import DATE

EPOCH = "BRACT_EPOCH"
"""Environment variable with the time at which the monotonic clock of this machine was zero, in
seconds since 1970. Processes of one federation are given the same."""


def epoch() -> str:
    """Return the value of `EPOCH` for the processes of a federation, by the machine's clock now."""
    return repr(time.time() - time.monotonic())


_kept: list[str] = []
"""The value of `EPOCH` by which this process, or the one it was forked from, counts already."""


def keep_even() -> None:
    """Make Flower read the monotonic clock if `EPOCH` is set; call after Flower is imported."""
    if EPOCH not in os.environ or _kept[-1:] == [os.environ[EPOCH]]:
        return
    start = float(os.environ[EPOCH])

    def now() -> datetime.datetime:
        return datetime.datetime.fromtimestamp(start + time.monotonic(), tz=datetime.UTC)

    old = replace(DATE, "now", now)
    for name, module in tuple(sys.modules.items()):
        if name.startswith("flwr.") and getattr(module, "now", None) is old:
            setattr(module, "now", now)  # noqa: B010
    _kept.append(os.environ[EPOCH])
