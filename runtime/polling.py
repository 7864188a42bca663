"""Waiting times of Flower's processes between two polls for a message, an answer or a part of one.

Flower's waits three seconds before it asks the SuperLink again, and half a second for its
ClientApp, so a round of a second takes five. Here a SuperNode asks again after a tenth of the time
since it last worked, a quarter of a second at least and Flower's three seconds at most: a message
waits a tenth longer than the pause before it, and a SuperNode that has nothing to do asks as seldom
as Flower's. A part of a message that has not arrived yet is asked for again after `BACKOFF` seconds
at first, where Flower waits one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from bract.installed.flower import NODE_RUNTIME, OBJECTS, SUPERNODE
from bract.runtime.long_polling import noting
from bract.runtime.rule import ALL, Layer, Rule

SHORTEST = 0.25
"""Seconds between two questions to the SuperLink, at least."""

BACKOFF = 0.05
"""Seconds until a part of a message is asked for again; they double with every time."""

_SHARE = 0.1
_IDLE = 3.0
_ANSWER = 0.1


class IdleWait:
    """Replaces ``time.sleep`` in a SuperNode's loop, whose only long wait is the idle one."""

    def __init__(self) -> None:
        self._worked = self._woke = time.monotonic()
        self.answered = threading.Event()
        """Set when a ClientApp has handed in its answer, which ends a wait for it."""

    def seconds(self, asked: float) -> float:
        """Return how long to wait where Flower waits ``asked`` seconds."""
        now = time.monotonic()
        if asked < _IDLE:
            self._worked = now
            return min(asked, _ANSWER)
        # A SuperLink that held the last question has waited already.
        pause = max(SHORTEST, _SHARE * (now - self._worked)) - (now - self._woke)
        return min(asked, max(0.0, pause))

    def sleep(self, asked: float) -> None:
        """Wait."""
        seconds = self.seconds(asked)
        if asked >= _IDLE:
            time.sleep(seconds)
        elif self.answered.wait(seconds):
            self.answered.clear()
        self._woke = time.monotonic()


def _poll_sooner(_: str) -> Mapping[str, Layer]:
    idle = IdleWait()
    paced = SimpleNamespace(**(vars(time) | {"sleep": idle.sleep}))
    return {_TIME: lambda _: paced, _ANSWERED: noting(idle.answered.set)}


_TIME = f"{SUPERNODE}:time"
_ANSWERED = f"{NODE_RUNTIME}.push_task_output"

POLL_SOONER = Rule(
    name="polling",
    kind="speed",
    commands=("flower-supernode",),
    needs=(_TIME, _ANSWERED),
    does="A SuperNode looks for messages and answers more often while there is work.",
    without="A SuperNode waits three seconds between two questions for messages.",
    put=_poll_sooner,
)


def _sooner(pull: Callable[..., Any]) -> Callable[..., Any]:
    def pull_objects(*values: Any, initial_backoff: float = BACKOFF, **options: Any) -> Any:
        return pull(*values, initial_backoff=min(initial_backoff, BACKOFF), **options)

    return pull_objects


_PULL = f"{OBJECTS}:pull_objects"

LATE_PARTS = Rule(
    name="late parts",
    kind="speed",
    commands=ALL,
    needs=(f"{_PULL}(initial_backoff)",),
    does=f"A late part of a message is asked for again after {BACKOFF} s, not 1 s.",
    without="A part that is late costs a second or more.",
    put=lambda _: {_PULL: _sooner},
    copied=True,
)
