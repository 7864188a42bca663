"""A SuperLink lets a node touch its own messages alone: those addressed to it, and its answers.

Flower checks that a request is signed by the key of the node that it names, and that an answer
names the node that was asked. It does not check that these are the same node, nor whose the message
is that a node says it has received, nor whose the parts are that a node asks for or sends; a part
without the name of an upload goes to whichever upload waits for it. The id of another site's
question is no secret: it is the hash of what all sites are asked, and of a moment.

A request about what is not a node's own does nothing, and is answered like one about what is not
there, since an honest node gets there too: the question is gone where the server app no longer
waits for the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from bract.errors import BractError, one_line
from bract.installed.flower import FLEET
from bract.runtime import owners
from bract.runtime.parts import by_name
from bract.runtime.rule import Layer, Rule

_NOTHING = "nothing"
"""Id of no message, part or upload."""

_log = logging.getLogger(__name__)


def _own_answers(taken: Callable[..., Any]) -> Callable[..., Any]:
    def push_messages(**given: Any) -> Any:
        request = given["request"]
        node = request.node.node_id
        for message in request.messages_list:
            named = message.metadata.src_node_id
            if named != node:
                raise BractError(
                    f"node {node} sent an answer that names node {named} as its sender; "
                    "it is refused",
                    code="identity-refused",
                )
        return taken(**given)

    return by_name(push_messages)


def _guarded(field: str, allowed: Callable[[Any, int, Any], bool], refused: str) -> Layer:
    """Let a handler of requests know a ``field`` of one only where it is the node's own."""

    def layer(inner: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(**given: Any) -> Any:
            request = given["request"]
            node = request.node.node_id
            if not allowed(given["state"], node, request):
                named = one_line(getattr(request, field), 80) or "without a name"
                _log.warning(f"node %d {refused}; it is refused", node, named)
                of_nothing = type(request)()
                of_nothing.CopyFrom(request)
                setattr(of_nothing, field, _NOTHING)
                given = given | {"request": of_nothing}
            return inner(**given)

        return by_name(guarded)

    return layer


_CONFIRM = f"{FLEET}.confirm_message_received"
_PULL, _PUSH = f"{FLEET}.pull_object", f"{FLEET}.push_object"
_ANSWER = f"{FLEET}.push_messages"


def _put(_: str) -> Mapping[str, Layer]:
    return {
        _ANSWER: _own_answers,
        _CONFIRM: _guarded(
            "message_object_id",
            lambda state, node, asked: asked.message_object_id in owners.questions_to(state, node),
            "says that it has received the message %s, which is none that waits for its answer",
        ),
        _PULL: _guarded(
            "object_id",
            lambda state, node, asked: owners.may_read(state, node, asked.object_id),
            "asks for the part %s, which is in no message that waits for its answer",
        ),
        _PUSH: _guarded(
            "session_id",
            lambda state, node, asked: owners.may_send(state, node, asked.session_id),
            "sends a part under the upload %s, which is none of its answers'",
        ),
    }


RULE = Rule(
    name="own messages",
    kind="security",
    commands=("flower-superlink",),
    needs=(
        *(f"{place}(request, state)" for place in (_ANSWER, _CONFIRM, _PULL, _PUSH)),
        *owners.PLACES,
    ),
    does="A node answers in its own name alone, reads and confirms messages that are addressed to "
    "it, and sends parts of its own answers.",
    without="a site could answer, read or drop messages of another",
    after=("bounded lists",),
    put=_put,
)
