"""Flower's clock in a federation on one machine goes on evenly, whatever the machine's is set to.

Flower counts the life of tokens, nodes and messages by the machine's clock: set forward by two
minutes, it would end a run. The processes of one machine share the kernel's monotonic clock, and
the start of that clock that they are given.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping

from bract.installed.flower import DATE
from bract.runtime.rule import ALL, Layer, Rule, hold

EPOCH = "BRACT_EPOCH"
"""Environment variable with the time at which the monotonic clock of this machine was zero, in
seconds since 1970. Processes of one federation are given the same."""


def epoch() -> str:
    """Return the value of `EPOCH` for the processes of a federation, by the machine's clock now."""
    return repr(time.time() - time.monotonic())


NOW = f"{DATE}:now"

_kept: list[str] = []
"""The value of `EPOCH` by which this process, or the one it was forked from, counts already."""


def use_monotonic_clock() -> None:
    """Make Flower read the monotonic clock if `EPOCH` is set; call after Flower is imported."""
    hold(ALL[0], (RULE,))


def _put(_: str) -> Mapping[str, Layer]:
    given = os.environ.get(EPOCH)
    if given is None or _kept[-1:] == [given]:
        return {}
    start = float(given)

    def now() -> datetime.datetime:
        return datetime.datetime.fromtimestamp(start + time.monotonic(), tz=datetime.UTC)

    def monotonic(_: Callable[[], datetime.datetime]) -> Callable[[], datetime.datetime]:
        _kept.append(given)
        return now

    return {NOW: monotonic}


RULE = Rule(
    name="monotonic clock",
    kind="reliability",
    commands=ALL,
    needs=(NOW,),
    does="The life of tokens, nodes and messages goes by the monotonic clock where a federation "
    "runs on one machine.",
    without="A clock that is set, or a laptop that slept, may end a run.",
    put=_put,
    copied=True,
)
