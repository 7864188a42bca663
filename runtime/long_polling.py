"""Servers of Flower hold a question until there is an answer to it, for a moment.

Flower's clients ask for messages and tasks, are answered that there are none, and wait. A shorter
wait costs processor time for every question, so under this rule the SuperLink and the SuperNode
answer as soon as there is something, or after `HOLD` seconds. A held question keeps one of the
server's forty threads: where `MOST_HELD` are held, others are answered at once, and so are those
of a client without the mark of `bract.runtime.parts`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bract.installed.flower import FLEET, LINK_RUNTIME, NODE_RUNTIME, SUPERNODE
from bract.runtime.parts import TOGETHER_AT_LINK, TOGETHER_AT_NODE, by_name, wants
from bract.runtime.rule import Layer, Rule

HOLD = 1.0
"""Seconds that a SuperNode's or a SuperExec's question is held."""

HOLD_SERVER_APP = 0.2
"""Seconds that a server app's is: it looks after each answer whether the round is to close."""

_MOMENT = 0.5
"""Seconds after a server app's question within which it waits if it asks again."""

MOST_HELD = 16

_LOOK = 0.1
"""Seconds between two looks for a task, whose coming nothing announces at a SuperLink. A message is
looked for when its last part came: it can be taken before, and its parts are then asked for."""


class Changes:
    """What wakes the questions that are held."""

    def __init__(self, most_held: int = MOST_HELD) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._free = threading.BoundedSemaphore(most_held)

    def note(self) -> None:
        """Wake all questions: something arrived."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def hold(
        self,
        look: Callable[[], Any],
        found: Callable[[Any], bool],
        seconds: float,
        every: float = math.inf,
    ) -> Any:
        """Return what ``look()`` returns, once ``found`` of it or after ``seconds``.

        It looks when woken, and where nothing wakes it ``every`` so many seconds.
        """
        end = time.monotonic() + seconds
        seen = self._count
        answer = look()
        if found(answer) or not self._free.acquire(blocking=False):
            return answer
        try:
            while not found(answer) and (left := end - time.monotonic()) > 0:
                with self._changed:
                    woken = self._count != seen or self._changed.wait(min(left, every))
                    seen = self._count
                if woken or every < math.inf:
                    answer = look()
            return answer
        finally:
            self._free.release()


class Repeats:
    """Tells a server app that waits for answers from one that looks for late ones in passing."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._when = -math.inf

    def again(self, messages: set[str]) -> bool:
        """Return whether an answer to one of these was asked for a moment ago, and to no other."""
        now = time.monotonic()
        again = messages <= self._asked and now - self._when < _MOMENT
        self._asked, self._when = messages, now
        return again


def _at_link(_: str) -> Mapping[str, Layer]:
    changes = Changes()
    waiting = _is_waiting(Repeats())
    return {
        f"{FLEET}.pull_messages": _held(changes, HOLD, _has_messages),
        f"{LINK_RUNTIME}.pull_messages": _held(changes, HOLD_SERVER_APP, _has_messages, waiting),
        f"{LINK_RUNTIME}.acquire_task": _held(changes, HOLD, _has_task, every=_LOOK),
        f"{FLEET}.push_object": _last_part(changes),
        f"{LINK_RUNTIME}.push_object": _last_part(changes),
    }


def _at_node(_: str) -> Mapping[str, Layer]:
    changes = Changes()
    return {
        f"{NODE_RUNTIME}.acquire_task": _held(changes, HOLD, _has_task, every=_LOOK),
        f"{SUPERNODE}:_pull_and_store_message": noting(changes.note),
    }


def noting(note: Callable[[], None]) -> Layer:
    """Return a layer that calls ``note`` after each call of a function."""

    def layer(handler: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*values: Any, **given: Any) -> Any:
            answer = handler(*values, **given)
            note()
            return answer

        return noted

    return layer


def _is_waiting(repeats: Repeats) -> Callable[[Any], bool]:
    return lambda request: repeats.again(set(request.message_ids))


def _held(
    changes: Changes,
    seconds: float,
    found: Callable[[Any], bool],
    waits: Callable[[Any], bool] = lambda _: True,
    *,
    every: float = math.inf,
) -> Layer:
    def layer(handler: Callable[..., Any]) -> Callable[..., Any]:
        def held(**given: Any) -> Any:
            if not (wants(given["request"]) and waits(given["request"])):
                return handler(**given)
            return changes.hold(lambda: handler(**given), found, seconds, every)

        return by_name(held)

    return layer


def _last_part(changes: Changes) -> Layer:
    """Wake questions once a message is there as a whole; the last part of one has the mark."""

    def layer(handler: Callable[..., Any]) -> Callable[..., Any]:
        def stored(**given: Any) -> Any:
            answer = handler(**given)
            if wants(given["request"]):
                changes.note()
            return answer

        return by_name(stored)

    return layer


def _has_messages(answer: Any) -> bool:
    return len(answer.messages_list) > 0


def _has_task(answer: Any) -> bool:
    return bool(answer.HasField("task"))


HELD_AT_LINK = Rule(
    name="held questions at the SuperLink",
    kind="speed",
    commands=("flower-superlink",),
    needs=(
        f"{FLEET}.pull_messages(request)",
        f"{FLEET}.push_object(request)",
        f"{LINK_RUNTIME}.pull_messages(request)",
        f"{LINK_RUNTIME}.push_object(request)",
        f"{LINK_RUNTIME}.acquire_task(request)",
    ),
    does=f"A question for messages or tasks is held until there is an answer, for {HOLD:.0f} s at "
    "the most.",
    without="A client is answered that there is nothing yet, and asks again later.",
    after=(TOGETHER_AT_LINK.name,),
    put=_at_link,
)

HELD_AT_NODE = Rule(
    name="held questions at the SuperNode",
    kind="speed",
    commands=("flower-supernode",),
    needs=(f"{NODE_RUNTIME}.acquire_task(request)", f"{SUPERNODE}:_pull_and_store_message"),
    does="A question for a task is held until there is one, for a second at the most.",
    without="An app starts up to a second after its message came.",
    after=(TOGETHER_AT_NODE.name, "the operator's app at the SuperNode"),
    put=_at_node,
)
