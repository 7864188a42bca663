"""Waiting times of Flower's processes between two polls for a message, an answer or a part of one.

Flower's waits three seconds before it asks the SuperLink again, and half a second for its
ClientApp, so a round of a second takes five. Here a SuperNode asks again after a tenth of the time
since it last worked, a quarter of a second at least and Flower's three seconds at most: a message
waits a tenth longer than the pause before it, and a SuperNode that has nothing to do asks as seldom
as Flower's. A part of a message that has not arrived yet is asked for again after `BACKOFF` seconds
at first, where Flower waits one.
"""

from __future__ import annotations

import importlib
import threading
import time
from types import SimpleNamespace

from bract.deploy import holding
from bract.deploy.rules import replace
from bract.errors import BractError
from bract.flower import OBJECTS, PULLS, SUPERNODE, installed

SHORTEST = 0.25
"""Seconds between two questions to the SuperLink, at least."""

BACKOFF = 0.05
"""Seconds until a part of a message is asked for again; they double with every time."""

_SHARE = 0.1
_IDLE = 3.0
_ANSWER = 0.1


class Pace:
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


def follow_work() -> None:
    """Let this SuperNode ask more often while there is work."""
    pace = Pace()
    paced = SimpleNamespace(**(vars(time) | {"sleep": pace.sleep}))
    replace(SUPERNODE, "time", paced)
    holding.note_task_outputs(pace.answered.set)


def ask_again_soon() -> None:
    """Let this process wait less for the parts of a message that have not arrived yet."""
    for function in PULLS:
        found = getattr(importlib.import_module(OBJECTS), function, None)
        defaults = getattr(found, "__kwdefaults__", None) or {}
        if "initial_backoff" not in defaults:
            raise BractError(
                f"{OBJECTS}.{function} of Flower {installed()} has no initial_backoff: a rule of "
                "bract would not hold, so the process does not start",
                code="flower-version",
            )
        defaults["initial_backoff"] = BACKOFF
