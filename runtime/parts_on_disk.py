"""Large parts of messages wait on disk in a SuperLink or SuperNode that keeps no database.

Flower holds every part in memory until it is taken: a SuperLink the answers of all clients of a
round, a SuperNode the model and its answer. Files have no names and go with what they hold.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bract.errors import one_line
from bract.installed.flower import STORE
from bract.runtime.rule import Layer, Rule

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


def layers(folder: Path) -> Mapping[str, Layer]:
    """Return layers by which a store in memory keeps large parts in a folder.

    Where the disk is full, they stay in memory.
    """
    return {_PUT: lambda put: _put_on_disk(put, folder), _GET: _get_from_disk}


def _put_on_disk(put: Callable[[Any, str, bytes], None], folder: Path) -> Callable[..., None]:
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
            _log.warning("a part stays in memory: %s: %s", folder, one_line(error, 200))
            return
        with self.lock_store:
            entry.content = part

    return put_on_disk


def _get_from_disk(get: Callable[[Any, str], Any]) -> Callable[..., bytes | None]:
    def get_from_disk(self: Any, object_id: str) -> bytes | None:
        content = get(self, object_id)
        return content.read() if isinstance(content, Part) else content

    return get_from_disk


_PUT, _GET = f"{STORE}.put", f"{STORE}.get"

RULE = Rule(
    name="large parts on disk",
    kind="reliability",
    commands=("flower-superlink", "flower-supernode"),
    needs=(f"{_PUT}(object_id, object_content)", _GET, f"{STORE}.lock_store", f"{STORE}.store"),
    does="Large parts of messages wait on disk where no database is kept.",
    without="The answers of all clients of a round are in memory at once.",
    put=lambda _: layers(Path(os.environ[FOLDER])) if FOLDER in os.environ else {},
)
