"""A grid around Flower's that polls for answers often."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from bract.errors import one_line
from bract.installed.flower import is_of_flower
from bract.process.timeline import span
from bract.strategies.polling import POLL, ForwardingGrid, collect

PUSHES = 5
"""How often the same messages are pushed before the run fails."""

_log = logging.getLogger(__name__)


class PromptGrid(ForwardingGrid):
    """Poll for answers every ``poll_interval`` seconds; Flower's own grid waits three."""

    def __init__(self, grid: Grid, poll_interval: float = POLL) -> None:
        super().__init__(grid)
        self.poll_interval = poll_interval

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, as often as the SuperLink loses a part of one."""
        return self._push(list(messages))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push ``messages`` and return the replies that arrive within ``timeout`` seconds."""
        with span("send messages"):
            waiting = self._push(list(messages))
        return collect(self.grid, waiting, timeout=timeout, poll=self.poll_interval)

    def _push(self, messages: list[Message]) -> Iterable[str]:
        """Push messages, again where the SuperLink was restarted in the midst of it.

        A message is known by the hash of its content: one that had arrived is not doubled.
        """
        for left in reversed(range(PUSHES)):
            try:
                return self.grid.push_messages(messages)
            except Exception as error:
                if not (left and is_of_flower(error)):
                    raise
                _log.warning(
                    "the SuperLink lost a part of a message, sent again: %s", one_line(error, 300)
                )
                time.sleep(self.poll_interval)
        raise AssertionError("unreachable")
