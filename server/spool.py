"""Answers of large models wait on disk, so that a round's memory does not grow with its clients."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from bract.errors import one_line
from bract.protocol.spooling import SpooledArray
from bract.strategies.polling import ForwardingGrid

SMALLEST = 1 << 20
"""Bytes from which on an array goes to disk; smaller ones are not worth a file."""

AT_ONCE = 4
"""Answers of a large model that are taken from the SuperLink, and so held in memory, together."""

BYTES_AT_ONCE = 1 << 26
"""Bytes of answers that are taken together at the most; of larger ones, one: while Flower joins the
parts of an answer, it is in memory twice."""

_log = logging.getLogger(__name__)


class SpoolingGrid(ForwardingGrid):
    """Put the large arrays of answers into files as they arrive.

    What reads them maps the files (`bract.protocol.arrays.from_arrays`): FedAvg's sum and the sum
    of ciphertexts go through all clients' tensors piece by piece. The files have no names and go
    with the messages. Where the disk is full, answers stay in memory.

    Parameters
    ----------
    grid
        Where answers come from.
    folder
        Where the files are made: on a disk, with room for one round's answers.
    """

    def __init__(self, grid: Grid, folder: Path) -> None:
        super().__init__(grid)
        self._folder = folder
        self._largest = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Forward, and note whether the model is a large one."""
        messages = list(messages)
        self._largest = max([self._largest, *map(_large_bytes, messages)])
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Return the answers that are there, their large arrays on disk."""
        waiting = list(message_ids)
        step = max(1, len(waiting))
        if self._largest:
            step = max(1, min(AT_ONCE, BYTES_AT_ONCE // self._largest))
        for start in range(0, len(waiting), step):
            arrived = list(self.grid.pull_messages(waiting[start : start + step]))[::-1]
            while arrived:
                self._spool(arrived[-1])
                yield arrived.pop()

    def _spool(self, message: Message) -> None:
        if not message.has_content():
            return
        self._largest = max(self._largest, _large_bytes(message))
        try:
            for record in message.content.array_records.values():
                for name, array in record.items():
                    if len(array.data) >= SMALLEST:
                        record[name] = SpooledArray(array, self._folder)
        except OSError as error:
            _log.warning("an answer stays in memory: %s: %s", self._folder, one_line(error, 200))


def _large_bytes(message: Message) -> int:
    """Return the bytes of a message's large arrays, 0 where it has none."""
    if not message.has_content():
        return 0
    records = message.content.array_records.values()
    sizes = [len(array.data) for record in records for array in record.values()]
    return sum(size for size in sizes if size >= SMALLEST)
