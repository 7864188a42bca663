"""Files that are one party's own, which others may neither read nor write."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bract.disk.named import check_file
from bract.disk.permissions import make_private_folder, open_private
from bract.errors import BractError, one_line

_log = logging.getLogger(__name__)


def read_private(path: Path, *, links: bool = True) -> bytes | None:
    """Read a private file; None where there is none.

    Parameters
    ----------
    links
        Whether a link is followed, as to a file of secrets that containers mount.

    Raises
    ------
    BractError
        If others may read it, it is a link that is not followed, or it cannot be read.
    """
    try:
        if not links and path.is_symlink():
            raise BractError(
                f"{path}: is a link, and a record of this client is a file of its own; remove the "
                "link, and put the file there",
                code="file-exposed",
            )
        with check_file(path, bounded=True).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise BractError(
                    f"{path}: other users may read this client's file (mode {mode:o}); "
                    f"run `chmod 600 {path}`",
                    code="file-exposed",
                )
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BractError(
            f"{path}: cannot be read ({one_line(error, 200)}); correct its permissions",
            code="file-unreadable",
        ) from error


@contextmanager
def locked(path: Path, *, patience: float = 60.0) -> Iterator[None]:
    """Hold the lock ``path`` while the block runs; wait for other processes and threads.

    Parameters
    ----------
    patience
        Seconds of waiting after which the log names the lock, once; it goes on waiting.

    Raises
    ------
    OSError
        If the file cannot be made or locked.
    """
    make_private_folder(path.parent, private=True)
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT, private=True)
    try:
        _wait_for(descriptor, path, patience)
        yield
    finally:
        # Closing does not unlock while a process that was forked in the block has it open, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, patience: float) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    words = "%s: another process has held this lock for %.0f s; end it if it was stopped"
    warning = threading.Timer(patience, _log.warning, (words, path, patience))
    warning.daemon = True
    warning.start()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        warning.cancel()
