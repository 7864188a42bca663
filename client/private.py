"""Files and folders that are a client's own, which others may neither read nor write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from bract.errors import BractError
from bract.permissions import make_private_folder, open_private, warn_if_open

_WARNED = "bract.warned-of-folders"


class OwnFileError(BractError):
    """A failure of the site's own files or settings, whose reason stays at the site."""

    code = "file-unreadable"


@contextmanager
def own_files() -> Iterator[None]:
    """Mark errors of the block as those of the site's own files, whatever their code.

    Raises
    ------
    OwnFileError
        In the place of a `BractError`, with its code and text.
    """
    try:
        yield
    except BractError as error:
        raise OwnFileError(str(error), code=error.code) from error


def warn_of_open_folders(state: RecordDict, *folders: Path | None) -> None:
    """Log which folders of this client others can read, once a run.

    Parameters
    ----------
    state
        ``context.state`` of the running message: each message has a process of its own.
    """
    seen = state.get(_WARNED)
    stored = seen["folders"] if isinstance(seen, ConfigRecord) else []
    known = set(map(str, stored)) if isinstance(stored, list) else set()
    warned = {str(f) for f in folders if f and str(f) not in known and warn_if_open(f)}
    if warned:
        state[_WARNED] = ConfigRecord({"folders": sorted(known | warned)})


def read_private(path: Path) -> bytes | None:
    """Read a private file; None where there is none."""
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise BractError(
                f"{path}: other users may read this client's file (mode {mode:o}); "
                f"run `chmod 600 {path}`",
                code="file-exposed",
            )
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BractError(
            f"{path}: cannot be read ({error}); correct its permissions", code="file-unreadable"
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock ``path`` while the block runs; wait for other processes and threads.

    Raises
    ------
    OSError
        If the file cannot be made or locked.
    """
    make_private_folder(path.parent, private=True)
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT, private=True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
