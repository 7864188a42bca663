"""Run ClientApps in this process behind Flower's Grid interface, without any network."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

App = Callable[[Message, Context], Message] | ClientApp


class LoopbackGrid(Grid):
    """Deliver each message to its node's app at once.

    Parameters
    ----------
    app
        The ClientApp of every node.
    node_configs
        One node configuration a client; node ids are 101, 102, ...
    run_config
        What every client finds in ``context.run_config``.
    """

    def __init__(self, app: App, node_configs: list[dict], run_config: dict | None = None) -> None:
        self.app = app
        self.contexts = {
            101 + i: Context(
                run_id=1,
                node_id=101 + i,
                node_config=node,
                state=RecordDict(),
                run_config=run_config or {},
            )
            for i, node in enumerate(node_configs)
        }
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}
        as_server()

    def set_run(self, run: Run) -> None:
        raise AssertionError("not used")

    @property
    def run(self) -> Run:
        raise AssertionError("not used")

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            name = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            self._replies[name] = self._deliver(message)
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages, *, timeout=None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1
        try:
            reply = self.app(message, self.contexts[node])
        except Exception as error:  # noqa: BLE001 - Flower turns any exception into an error reply
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(code=2, reason=reason), reply_to=message)
        finally:
            as_server()
        return reply


def as_server() -> None:
    """Let messages made from here on come from the server."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
