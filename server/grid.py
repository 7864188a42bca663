"""Grids around Flower's: one that forwards, one that looks for replies often."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from bract.flower import ObjectPushError
from bract.timeline import note, span

PUSHES = 5
"""How often the same messages are pushed before the run fails."""

_log = logging.getLogger(__name__)


class ForwardingGrid(Grid):
    """Pass every call on to another grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def set_run(self, run: Any) -> None:
        """Forward."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run that the grid belongs to."""
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Forward."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Forward."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Forward."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Forward."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Forward."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Forward."""
        return self.grid.send_and_receive(messages, timeout=timeout)


class PromptGrid(ForwardingGrid):
    """Look for replies every ``poll_interval`` seconds; Flower's own grid waits three."""

    def __init__(self, grid: Grid, poll_interval: float = 0.2) -> None:
        super().__init__(grid)
        self.poll_interval = poll_interval

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push ``messages`` and return the replies that arrive within ``timeout`` seconds."""
        with span("send messages"):
            waiting = set(self._push(list(messages)))
        began = time.monotonic_ns()
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and (end is None or time.monotonic() < end):
            looked = time.monotonic_ns()
            arrived = list(self.grid.pull_messages(waiting))
            if arrived:
                note("wait for answers", began, looked)
                note(f"take {len(arrived)} answers", looked)
                began = time.monotonic_ns()
            replies += arrived
            waiting -= {m.metadata.reply_to_message_id for m in arrived}
            if waiting:
                time.sleep(self.poll_interval)
        return replies

    def _push(self, messages: list[Message]) -> Iterable[str]:
        """Push messages, again where the SuperLink was restarted in the midst of it.

        A message is known by the hash of its content: one that had arrived is not doubled.
        """
        for left in reversed(range(PUSHES)):
            try:
                return self.grid.push_messages(messages)
            except ObjectPushError as error:
                if not left:
                    raise
                _log.warning("the SuperLink lost a part of a message, sent again: %s", error)
                time.sleep(self.poll_interval)
        raise AssertionError("unreachable")
