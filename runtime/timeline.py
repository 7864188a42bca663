"""Spans of what Flower's processes ask of each other, for `bract run --profile`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bract.process.timeline import FOLDER, note
from bract.runtime import sockets
from bract.runtime.rule import Layer, Rule

if TYPE_CHECKING:
    import httpx

_SPANS = {
    "flower-supernode": {
        "PullMessages": "take message from SuperLink",
        "PullObject": "take part of message from SuperLink",
        "PushMessages": "send answer to SuperLink",
        "PushObject": "send part of answer to SuperLink",
    },
    "flwr-clientapp": {
        "PullTaskInput": "take task from SuperNode",
        "PullMessages": "take message from SuperNode",
        "PullObject": "take part of message from SuperNode",
        "PushMessages": "hand answer to SuperNode",
        "PushObject": "hand part of answer to SuperNode",
        "PushTaskOutput": "hand state to SuperNode",
    },
}
"""What a command's requests are for, by the last part of their names."""

REQUESTS = frozenset(name for names in _SPANS.values() for name in names.values())
"""Names of the spans of requests."""


class Spans:
    """Interceptor that notes how long a request took; a question without an answer is left out."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Pass a request on."""
        began = time.monotonic_ns()
        response: httpx.Response = call_next(context)
        method = str(context.rpc_method).rpartition("/")[2]
        if method in self._names and (method != "PullMessages" or response.content):
            note(self._names[method], began)
        return response


def _put(name: str) -> Mapping[str, Layer]:
    """Note the requests of the command ``name``, where a profile is wanted."""
    if FOLDER not in os.environ:
        return {}
    return {sockets.CONSTRUCTED: sockets.intercepted(Spans(_SPANS[name]))}


RULE = Rule(
    name="profile",
    kind="reliability",
    commands=tuple(_SPANS),
    needs=(f"{sockets.CONSTRUCTED}(interceptors)",),
    does="`bract run --profile` notes the requests of Flower's processes.",
    without="A profile lacks the requests.",
    after=("requests to sockets", "several connections"),
    put=_put,
)
