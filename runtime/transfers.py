"""How many connections a SuperNode uses at once for the parts of a message.

TCP takes a lost packet for a full link and sends less, so one connection over a link that loses a
few packets in a hundred gets a small part of it, and several get several parts. Flower moves two
parts at a time, fewer on a machine of one core. Here a SuperNode moves `MOST` until parts were seen
to come and go fast, and `FEWEST` from then on: each part that is under way is in the SuperLink's
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from bract.installed.flower import OBJECTS
from bract.runtime.rule import Layer, Rule
from bract.runtime.sockets import CONSTRUCTED, intercepted

FEWEST, MOST = 2, 8

FAST = 2.5e6
"""Bytes a second on one connection from which on `FEWEST` are enough."""

_MOVES = ("/PushObject", "/PullObject")
_SMALLEST = 1 << 19
"""Bytes below which a part says more of the way there and back than of the link."""


class Connections:
    """Observes the parts of messages that a SuperNode moves; decides how many move at once."""

    def __init__(self) -> None:
        self._rate = 0.0

    def number(self, _asked: int = 0) -> int:
        """Return the number of connections for the next message."""
        return FEWEST if self._rate >= FAST else MOST

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Send one request; note how fast its part moved."""
        began = time.monotonic()
        response = call_next(context)
        if context.rpc_method.endswith(_MOVES) and response.status_code == 200:
            moved = len(context.request.content) + len(response.content)
            if moved >= _SMALLEST:
                self._rate = moved / max(time.monotonic() - began, 1e-9)
        return response


_WORKERS = f"{OBJECTS}:get_num_workers"


def _put(_: str) -> Mapping[str, Layer]:
    connections = Connections()
    return {_WORKERS: lambda _: connections.number, CONSTRUCTED: intercepted(connections)}


RULE = Rule(
    name="several connections",
    kind="speed",
    commands=("flower-supernode",),
    needs=(_WORKERS, f"{CONSTRUCTED}(interceptors)"),
    does=f"A SuperNode moves {MOST} parts of a message at once where its link is slow.",
    without="It moves two, also over a link that loses packets.",
    after=("signs of life",),
    put=_put,
)
