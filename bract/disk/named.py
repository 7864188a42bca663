"""Files that a person named: opened without waiting, and read within bounds.

Opening a named pipe waits for a writer, a device has no end, and a file may be larger than memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

from bract.disk.files import readable_size
from bract.errors import BractError, one_line

MOST_BYTES = 4 << 20
"""Bytes that a text may have which a person wrote: a configuration, a policy, a certificate."""


_Error = TypeVar("_Error", bound=BractError)


def unreadable(path: Path | str, error: Exception, kind: type[_Error]) -> _Error:
    """Return an error of this kind which says that a file cannot be read, and why."""
    return kind(f"{path}: cannot be read: {one_line(error, 200)}", code="file-unreadable")


class UnfitFileError(OSError):
    """A file that is no such file as was expected; its text says why, and what to name instead."""


def check_file(path: Path, *, bounded: bool = False) -> Path:
    """Return a path as it is, unless to read it might not end.

    Parameters
    ----------
    bounded
        Whether no more is read than a bound, so that a device or a shell's ``<(...)`` may be named.

    Raises
    ------
    OSError
        If it is a named pipe; and unless ``bounded`` another pipe, a device or a socket.
    """
    mode = os.stat(path).st_mode  # noqa: PTH116 - what a link leads to
    if bounded and not stat.S_ISFIFO(mode):
        return path
    # A shell's own pipe has a writer, and no name in any folder.
    if bounded and Path(path).resolve().name.startswith("pipe:"):
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UnfitFileError("it is a pipe, a device or a socket, expected a file; name a file")
    return path


def open_named(path: Path) -> BinaryIO:
    """Open a file of which no more is read than a bound.

    Raises
    ------
    OSError
        If it cannot be opened, or is a named pipe.
    """
    return check_file(path, bounded=True).open("rb")


def read_named(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Return a file's content.

    Parameters
    ----------
    most
        Bytes that it may have.

    Raises
    ------
    OSError
        If it cannot be read, is a named pipe, or has more.
    """
    with open_named(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnfitFileError(f"it has more than {readable_size(most)}; name another file")
    return content
