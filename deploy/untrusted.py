"""A server app takes an answer that cannot be decoded as an error of the site that sent it.

Flower's grid decodes answers outside of any guard, so nine objects of one site, of which one is no
JSON, end the run of all. It also takes sender, run and question from the answer itself, where its
sender may write what it likes: the SuperLink has checked those that the site announced, and the
two are compared here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flwr.app import Error, Message, Metadata

from bract.deploy.rules import replace
from bract.errors import BractError, one_line
from bract.flower import GRID, ProtobufClient
from bract.protocol.codes import ErrorCode

_ANNOUNCED = (
    "run_id",
    "src_node_id",
    "dst_node_id",
    "reply_to_message_id",
    "group_id",
    "message_type",
)
"""Metadata of an answer that must be those which the SuperLink has checked."""


def read_answers_as_untrusted() -> None:
    """Have the grid of this server app return an error in the place of a spoilt answer."""
    answers = Answers()
    ask = ProtobufClient._unary_unary

    def send(client: ProtobufClient, **given: Any) -> Any:
        response = ask(client, **given)
        if given["rpc_method"].endswith("/PullMessages"):
            answers.announce(response)
        return response

    setattr(ProtobufClient, "_unary_unary", send)  # noqa: B010
    answers.decode = replace(GRID, "inflate_object_from_contents", answers.read)


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
