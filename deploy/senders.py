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
from collections.abc import Callable
from typing import Any

from bract.deploy import owners, parts, rules
from bract.errors import BractError, one_line
from bract.flower import FLEET

_NOTHING = "nothing"
"""Id of no message, part or upload."""

_log = logging.getLogger(__name__)


def check_senders() -> None:
    """Have this SuperLink refuse what a node sends, asks or says about another's message."""

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

    taken = rules.replace(FLEET, "push_messages", parts.by_name(push_messages))
    _guard(
        "confirm_message_received",
        "message_object_id",
        lambda state, node, request: request.message_object_id in owners.questions_to(state, node),
        "says that it has received the message %s, which is none that waits for its answer",
    )
    _guard(
        "pull_object",
        "object_id",
        lambda state, node, request: owners.may_read(state, node, request.object_id),
        "asks for the part %s, which is in no message that waits for its answer",
    )
    _guard(
        "push_object",
        "session_id",
        lambda state, node, request: owners.may_send(state, node, request.session_id),
        "sends a part under the upload %s, which is none of its answers'",
    )


def _guard(
    handler: str, field: str, allowed: Callable[[Any, int, Any], bool], refused: str
) -> None:
    """Let a handler of requests know a ``field`` of one only where it is the node's own."""

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

    inner = rules.replace(FLEET, handler, parts.by_name(guarded))
