"""The small parts of a message travel together, where Flower takes a request for each.

A message of Flower is a tree of objects, eight of them for a train message, and each crosses every
hop in a request of its own: 150 requests in a round of three clients, which cost more processor
time than the training of a small model. Under this rule the answer to a question for messages
brings the parts of up to `MOST` bytes along, and the parts of a message that is sent go in the
request of its last one.

Both travel as a field that Flower's messages do not have: a peer without this rule skips it, and
is asked for each part as before. Each part goes through Flower's own handler for one part, with
the identity of the request that brought it, so what is checked and counted stays the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bract.installed.flower import CLIENT, FLEET, LINK_RUNTIME, NODE_RUNTIME, place
from bract.protocol.codes import SUPERLINK_NODE
from bract.runtime.rule import ALL, Layer, Rule, at

MOST = 1 << 20
"""Bytes of the parts that travel together; others go alone, over several connections at once."""

_FIELD = b"\xc2\x3e"
"""Tag of field 1000, of bytes, as Protocol Buffers encode it."""

_NUMBER = 1000
_ID = 64
"""Characters of an object's id, a SHA-256 in hexadecimal; its content follows."""


def _served(handlers: str) -> Mapping[str, Layer]:
    """Return layers by which handlers of requests give and take the parts of a message together."""
    return {
        f"{handlers}.pull_messages": lambda asked: by_name(_with_parts(handlers, asked)),
        f"{handlers}.push_messages": lambda announced: by_name(_marked(announced)),
        f"{handlers}.push_object": lambda stored: by_name(_each_part(stored)),
    }


def _with_parts(handlers: str, asked: Callable[..., Any]) -> Callable[..., Any]:
    from bract.installed.flower import PullObjectRequest

    def pull_messages(**given: Any) -> Any:
        response = asked(**given)
        if not wants(given["request"]):
            return response
        pull_object = at(f"{handlers}.pull_object")  # under the rules that hold for one part
        task = {"task": given["task"]} if "task" in given else {}
        node: Any = getattr(given["request"], "node", {"node_id": SUPERLINK_NODE})
        size = 0
        seen = set()
        trees = zip(response.messages_list, response.message_object_trees, strict=True)
        for run, part in ((m.metadata.run_id, part) for m, tree in trees for part in _ids(tree)):
            if part in seen:
                continue
            seen.add(part)
            request = PullObjectRequest(node=node, run_id=run, object_id=part)
            content = pull_object(request=request, state=given["state"], **task).object_content
            size += len(content)
            if size > MOST:
                break
            if content:
                _append(response, part.encode() + content)
        return response

    return pull_messages


def _marked(announced: Callable[..., Any]) -> Callable[..., Any]:
    def push_messages(**given: Any) -> Any:
        response = announced(**given)
        if wants(given["request"]):
            _append(response, b"")
        return response

    return push_messages


def _each_part(stored: Callable[..., Any]) -> Callable[..., Any]:
    def push_object(**given: Any) -> Any:
        request = given["request"]
        alone = _without_parts(request)
        for part, content in _parts(request):
            more = type(request)()
            more.CopyFrom(alone)
            more.object_id, more.object_content = part, content
            response = stored(**(given | {"request": more}))
            if not response.stored:
                return response
        return stored(**given)

    return push_object


def by_name(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Let a handler be called as Flower's routes do: all by name, or request, state and task."""

    def call(*values: Any, **given: Any) -> Any:
        return handler(**dict(zip(("request", "state", "task"), values, strict=False)), **given)

    return call


def _asked(send_one: Callable[..., Any]) -> Callable[..., Any]:
    """Have a client of Flower's ask for the parts of messages together, and send them so."""

    def send(client: Any, **given: Any) -> Any:
        exchange = vars(client).setdefault("_bract_parts", _Exchange())
        return exchange.send(lambda **request: send_one(client, **request), given)

    return send


class _Exchange:
    """The parts that one of Flower's clients has received unasked, or has not sent yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: dict[str, bytes] = {}
        self._to_send: set[str] = set()
        self._held: list[tuple[str, bytes]] = []
        self._together = False

    def send(self, send: Callable[..., Any], given: dict[str, Any]) -> Any:
        request, method = given["request"], given["rpc_method"].rpartition("/")[2]
        if method == "PullObject":
            content = self._received.get(request.object_id)  # one part may be asked for twice
            if content is not None:
                return given["response_type"](
                    object_found=True, object_available=True, object_content=content
                )
        if method == "PushObject":
            ready = self._keep(request)
            if not ready:
                return given["response_type"](stored=True)
        if method in ("PullMessages", "PushMessages", "AcquireTask"):
            _append(request, b"")
        response = send(**given)
        if method == "PullMessages":
            self._received = dict(_parts(response))
        if method == "PushMessages":
            with self._lock:
                self._together, self._held = wants(response), []
                self._to_send = set(response.objects_to_push)
        return response

    def _keep(self, request: Any) -> bool:
        """Keep a part for later; False where it is kept, True where it goes now, with others."""
        with self._lock:
            if not self._together:
                return True
            self._to_send.discard(request.object_id)
            last = not self._to_send
            if not last:
                size = len(request.object_content) + sum(len(content) for _, content in self._held)
                if size > MOST:
                    return True
                self._held.append((request.object_id, request.object_content))
                return False
            _append(request, b"")  # the last one
            for part, content in self._held:
                _append(request, part.encode() + content)
            self._held = []
            return True


def wants(message: Any) -> bool:
    """Return whether the sender of a message of Flower's protocol has this rule."""
    return next(_fields(message), None) is not None


def _parts(message: Any) -> Iterator[tuple[str, bytes]]:
    for found in _fields(message):
        if len(found) > _ID:
            yield found[:_ID].decode("ascii", errors="replace"), found[_ID:]


def _without_parts(request: Any) -> Any:
    """Return what the requests of all parts have in common.

    Once a request: to copy all of its parts for each of them takes the square of their number.
    """
    alone = type(request)()
    alone.CopyFrom(request)
    alone.DiscardUnknownFields()
    alone.ClearField("object_content")
    return alone


def _fields(message: Any) -> Iterator[bytes]:
    from google.protobuf.unknown_fields import UnknownFieldSet

    for field in UnknownFieldSet(message):
        if field.field_number == _NUMBER and isinstance(field.data, bytes):
            yield field.data


def _append(message: Any, content: bytes) -> None:
    size, length = bytearray(), len(content)
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    message.MergeFromString(_FIELD + bytes(size) + content)


def _ids(tree: Any) -> Iterable[str]:
    yield tree.object_id
    for child in tree.children:
        yield from _ids(child)


_SENDS = f"{CLIENT}._unary_unary"

ASKED_TOGETHER = Rule(
    name="parts together",
    kind="speed",
    commands=ALL,
    needs=(f"{_SENDS}(request, rpc_method, response_type)",),
    does="The small parts of a message are asked for and sent in one request; to a Flower without "
    "this rule part by part.",
    without="Each part takes a request of its own, 150 in a round of three clients.",
    put=lambda _: {_SENDS: _asked},
)


def _needs(*handlers: str) -> tuple[str, ...]:
    functions = ("pull_messages", "push_messages", "push_object", "pull_object")
    used = (f"{one}.{function}(request, state)" for one in handlers for function in functions)
    return (*used, f"{place('PullObjectRequest')}(node, run_id, object_id)")


TOGETHER_AT_LINK = Rule(
    name="parts together at the SuperLink",
    kind="speed",
    commands=("flower-superlink",),
    needs=_needs(FLEET, LINK_RUNTIME),
    does="The SuperLink gives and takes the small parts of a message in one request.",
    without="Each part takes a request of its own.",
    after=("own messages",),
    put=lambda _: {**_served(FLEET), **_served(LINK_RUNTIME)},
)

TOGETHER_AT_NODE = Rule(
    name="parts together at the SuperNode",
    kind="speed",
    commands=("flower-supernode",),
    needs=_needs(NODE_RUNTIME),
    does="A SuperNode gives and takes the small parts of a message in one request.",
    without="Each part takes a request of its own.",
    put=lambda _: _served(NODE_RUNTIME),
)
