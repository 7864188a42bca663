"""Files that are a client's own: never read where others may read or write them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bract.errors import BractError


def read_private(path: Path) -> bytes | None:
    """Read a private file; None where there is none.

    Raises
    ------
    BractError
        If it cannot be read, or others may read or write it.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise BractError(
                f"{path}: other users may read this client's file (mode {mode:o}); "
                f"run `chmod 600 {path}`"
            )
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BractError(f"{path}: cannot be read ({error}); mend its permissions") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock ``path`` while the block runs; wait for other processes and threads.

    Raises
    ------
    OSError
        If the file cannot be made or locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
