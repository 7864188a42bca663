"""A grid without processes: ClientApps run in this one, as soon as they are sent a message.

For tests, experiments and a first look at one's own ServerApp::

    grid = LoopbackGrid(client_app, [{"partition-id": i} for i in range(3)], run_config)
    strategy.start(grid, initial_arrays, num_rounds=3)

Flower's deployment engine does the same over the network; what differs is that nothing is
serialised and no time passes between a message and its answer.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from bract.errors import contained, in_words
from bract.protocol.codes import ErrorCode

Config = Mapping[str, bool | float | int | str]


class LoopbackGrid(Grid):
    """Nodes 1..N, each with a node config and a state of its own, that run one ClientApp.

    An exception in the ClientApp becomes an error reply of code 2, as in Flower's own engine.

    Parameters
    ----------
    client_app
        The app, or a function that turns a node's number from 0 into its app.
    node_configs
        One node config a node; node i (from 0) has the id i + 1.
    run_config
        The run config of every node.
    faults
        ``faults(message)`` is asked before each delivery. It returns None to deliver, ``drop`` to
        lose the message without an answer, and any other text to answer with an error of code 5
        (node unavailable) of that reason.
    run_id
        Flower's id of the run; a new one, at random as Flower draws it, where None is given.
    """

    def __init__(
        self,
        client_app: ClientApp | Callable[[int], ClientApp],
        node_configs: Sequence[Config],
        run_config: Config | None = None,
        *,
        faults: Callable[[Message], str | None] | None = None,
        run_id: int | None = None,
    ) -> None:
        self._app = client_app
        run_id = secrets.randbits(62) if run_id is None else run_id
        self._run: Any = SimpleNamespace(run_id=run_id)
        self._faults = faults or (lambda _: None)
        self._replies: dict[str, Message] = {}
        self._count = 0
        self.contexts = {
            i + 1: Context(run_id, i + 1, dict(config), RecordDict(), dict(run_config or {}))
            for i, config in enumerate(node_configs)
        }
        self.log: list[Message] = []
        _take_identity(run_id)

    def set_run(self, run: Any) -> None:
        """Set the run that `run` returns."""
        self._run = run

    @property
    def run(self) -> Any:
        """The run that the grid belongs to, of which ``run_id`` alone is known until `set_run`."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return 1..N."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the ClientApp on every message; `log` keeps the messages."""
        ids = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = str(self._count)
            if not message.metadata.run_id:  # before Flower 1.37 the grid sets it
                message.metadata.__dict__["_run_id"] = self._run.run_id
            ids.append(message.metadata.message_id)
            self.log.append(message)
            fault = self._faults(message)
            if fault == "drop":
                continue
            if fault is not None:
                reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, fault), reply_to=message)
            else:
                reply = self._answer(message)
            self._replies[message.metadata.message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that are there, once each."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push ``messages`` and return the answers; what was dropped is not waited for."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        app = self._app if isinstance(self._app, ClientApp) else self._app(context.node_id - 1)
        try:
            with contained():
                return app(message, context)
        except Exception as error:  # noqa: BLE001 - a node outlives whatever its app raises
            reason = f"{type(error)}:<'{in_words(error)}'>"
            return Message(Error(ErrorCode.APP_RAISED, reason), reply_to=message)


def _take_identity(run_id: int) -> None:
    """Let this process create messages; before Flower 1.37 it needs no identity for that."""
    try:
        from bract.installed.flower import TaskIdentity
    except (ImportError, AttributeError):
        # The identity that messages themselves refer to, wherever Flower keeps it.
        identity = getattr(sys.modules[Message.__module__], "TaskIdentity", None)
    else:
        identity = TaskIdentity
    if identity is not None:
        identity.run_id, identity.node_id, identity.task_id = run_id, 0, 0
