"""Calls on Flower's grid: one that forwards them, and the loop that polls for answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from bract.process.timeline import note

POLL = 0.2
"""Seconds between two polls for answers; Flower's own grid waits three."""


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
        """Forward; before Flower 1.37 a grid knows its nodes' numbers alone."""
        return nodes_of(self.grid)

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


def nodes_of(grid: Grid) -> Iterable[Any]:
    """Return the connected nodes, each with ``node_id`` and ``name``."""
    if hasattr(grid, "get_nodes"):
        found: Iterable[Any] = grid.get_nodes()
        return found
    return [SimpleNamespace(node_id=node, name="") for node in grid.get_node_ids()]


def collect(
    grid: Grid,
    message_ids: Iterable[str],
    *,
    timeout: float | None,
    poll: float = POLL,
    closed: Callable[[Sequence[Message]], bool] = lambda _: False,
) -> list[Message]:
    """Return the answers to pushed messages.

    Parameters
    ----------
    grid
        Where they come from.
    message_ids
        Ids of the messages that were pushed.
    timeout
        Seconds after which it returns what came; None waits for all.
    poll
        Seconds between two polls.
    closed
        Given all answers so far after each poll, returns whether to wait no longer.
    """
    waiting, replies = set(message_ids), list[Message]()
    began = time.monotonic_ns()
    end = None if timeout is None else time.monotonic() + timeout
    while waiting and (end is None or time.monotonic() < end):
        looked = time.monotonic_ns()
        arrived = list(grid.pull_messages(waiting))
        if arrived:
            note("wait for answers", began, looked)
            note(f"take {len(arrived)} answers", looked)
            began = time.monotonic_ns()
        replies += arrived
        waiting -= {m.metadata.reply_to_message_id for m in arrived}
        if closed(replies):
            break
        if waiting and not arrived:
            # A SuperLink that held the question has waited already.
            time.sleep(max(0.0, poll - (time.monotonic_ns() - looked) / 1e9))
    return replies
