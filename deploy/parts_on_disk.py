"""Large parts of messages wait on disk in a SuperLink or SuperNode that keeps no database.

Flower holds every part in memory until it is taken: a SuperLink the answers of all clients of a
round, a SuperNode the model and its answer. Files have no names and go with what they hold.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bract.deploy.trees import stores

FOLDER = "BRACT_PARTS_FOLDER"
"""Environment variable with a folder on a disk; without it, parts stay in memory."""

SMALLEST = 1 << 20
"""Bytes from which on a part goes to disk; smaller ones are not worth a file."""

_log = logging.getLogger(__name__)


class Part:
    """Bytes in an unlinked file of a folder; OSError where it cannot be written."""

    def __init__(self, content: bytes, folder: Path) -> None:
        self._size = len(content)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def read(self) -> bytes:
        """Return the bytes."""
        return os.pread(self._file.fileno(), self._size, 0)


def keep_parts_on_disk() -> None:
    """Have the store in memory of this process keep large parts in `FOLDER`, where that is set."""
    if FOLDER not in os.environ:
        return
    keep(stores()[0], Path(os.environ[FOLDER]))


def keep(store: Any, folder: Path) -> None:
    """Have a class of stores in memory keep large parts in a folder.

    Where the disk is full, they stay in memory.
    """
    put: Callable[[Any, str, bytes], None] = store.put
    get: Callable[[Any, str], Any] = store.get

    def put_on_disk(self: Any, object_id: str, object_content: bytes) -> None:
        put(self, object_id, object_content)
        if len(object_content) < SMALLEST:
            return
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry is None or isinstance(entry.content, Part):
                return
        try:
            part = Part(object_content, folder)
        except OSError as error:
            _log.warning("a part stays in memory: %s: %s", folder, error.strerror or error)
            return
        with self.lock_store:
            entry.content = part

    def get_from_disk(self: Any, object_id: str) -> bytes | None:
        content = get(self, object_id)
        return content.read() if isinstance(content, Part) else content

    store.put, store.get = put_on_disk, get_from_disk
