"""A server app takes an answer that cannot be decoded as an error of the site that sent it.

Flower's grid decodes answers outside of any guard, so nine objects of one site, of which one is no
JSON, end the run of all. It also takes sender, run and question from the answer itself, where its
sender may write what it likes: the SuperLink has checked those that the site announced, and the
two are compared here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Error, Message, Metadata

from bract.errors import BractError, one_line
from bract.installed.flower import CLIENT, GRID
from bract.protocol.codes import ErrorCode
from bract.runtime.rule import Layer, Rule

_ANNOUNCED = (
    "run_id",
    "src_node_id",
    "dst_node_id",
    "reply_to_message_id",
    "group_id",
    "message_type",
)
"""Metadata of an answer that must be those which the SuperLink has checked."""


def _put(_: str) -> Mapping[str, Layer]:
    answers = Answers()

    def announcing(ask: Callable[..., Any]) -> Callable[..., Any]:
        def send(client: Any, **given: Any) -> Any:
            response = ask(client, **given)
            if given["rpc_method"].endswith("/PullMessages"):
                answers.announce(response)
            return response

        return send

    def decoding(decode: Callable[..., Any]) -> Callable[..., Any]:
        answers.decode = decode
        return answers.read

    return {_SENDS: announcing, _DECODES: decoding}


_SENDS = f"{CLIENT}._unary_unary"
_DECODES = f"{GRID}:inflate_object_from_contents"


class Answers:
    """The answers that this thread's last question returned."""

    decode: Callable[[str, dict[str, bytes]], Any]
    """Flower's function, which returns an object by its id and the contents of its parts."""

    def __init__(self) -> None:
        self._here = threading.local()

    def announce(self, response: Any) -> None:
        """Note the metadata under which the SuperLink took each answer."""
        self._here.found = {m.metadata.message_id: m.metadata for m in response.messages_list}

    def read(self, message_id: str, contents: dict[str, bytes], **others: Any) -> Message:
        """Return an answer, or an error in its place that says what is wrong with it."""
        announced = self._here.found[message_id]
        try:
            message = self.decode(message_id, contents, **others)
            _check(message, announced)
        # Flower decodes with whatever its parsers raise, memory and recursion among it.
        except Exception as error:  # noqa: BLE001
            return error_for(announced, f"sent an answer that cannot be decoded: {_text(error)}")
        return message  # type: ignore[no-any-return]


def _check(message: Any, announced: Any) -> None:
    if not isinstance(message, Message):
        raise BractError(
            f"it is of the type {type(message).__name__}, expected Message",
            code="message-malformed",
        )
    for name in _ANNOUNCED:
        found, expected = getattr(message.metadata, name), getattr(announced, name)
        if found != expected:
            raise BractError(
                f"its {name} is {found!r}, and {expected!r} was announced for it",
                code="message-malformed",
            )


def _text(error: Exception) -> str:
    if isinstance(error, BractError):
        return one_line(error, 300)
    return one_line(f"{type(error).__name__}: {error}", 300)


def error_for(announced: Any, reason: str) -> Message:
    """Return an error in the place of an answer, by its metadata, with an id of its own."""
    metadata = Metadata(
        run_id=announced.run_id,
        message_id="",
        src_node_id=announced.src_node_id,
        dst_node_id=announced.dst_node_id,
        reply_to_message_id=announced.reply_to_message_id,
        group_id=announced.group_id,
        created_at=announced.created_at,
        ttl=announced.ttl,
        message_type=announced.message_type,
    )
    make: Any = Message
    made: Message = make(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
    vars(made.metadata)["_message_id"] = made.object_id
    return made


RULE = Rule(
    name="untrusted answers",
    kind="security",
    commands=("flwr-serverapp",),
    needs=(f"{_DECODES}(object_id, object_contents)", f"{_SENDS}(request, rpc_method)"),
    does="An answer that cannot be decoded, or names another sender than the SuperLink has "
    "checked, is its site's error and ends no run.",
    without="a site could end the run of all, or answer in the name of another",
    after=("parts together",),
    put=_put,
)
