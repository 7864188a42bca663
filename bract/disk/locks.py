"""One writer at a time: a lock on a file that ends with its holder, in whatever way that ends.

The kernel holds the lock (``flock``), not the file: a file that is left behind locks nothing, and
its record of the last holder counts only while the lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from bract.disk.permissions import open_private
from bract.errors import BractError, one_line

LOCK = ".lock"
"""Name of the file in a run directory that is locked by the command that works on the run."""

_PATIENCE = 0.5
"""Seconds for which an attempt goes on: `holder` locks for a moment, too."""


_mine: set[tuple[int, int]] = set()
"""Device and inode of the locks that this process holds."""


class LockedError(BractError):
    """Another process holds the lock."""

    code = "file-locked"


@contextlib.contextmanager
def lock(path: Path, *, what: str, doing: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Hold the lock ``path`` while the block runs.

    Parameters
    ----------
    what
        What is locked, as an error begins with it.
    doing
        What the holder does, for whom it keeps out: the command, on one line.
    patience
        Seconds to wait for an earlier holder.

    Raises
    ------
    LockedError
        If another process holds it, naming that one and how to go on.
    BractError
        If the file cannot be made or locked.
    """
    deadline = time.monotonic() + patience
    descriptor = _opened(path)
    with os.fdopen(descriptor, "r+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LockedError(_refusal(what, path)) from None
                time.sleep(0.05)
            except OSError as error:
                raise BractError(
                    f"{path}: this file system has no locks ({one_line(error, 200)}), and two "
                    "writers would spoil each other's work; choose a folder on another one",
                    code="file-unwritable",
                ) from error
        about = {"pid": os.getpid(), "host": socket.gethostname(), "doing": one_line(doing, 200)}
        # A full disk does not prevent work: the lock is held without a name.
        with contextlib.suppress(OSError):
            file.truncate()
            os.pwrite(file.fileno(), json.dumps(about).encode(), 0)
        try:
            _mine.add(_identity(file.fileno()))
            yield
        finally:
            _mine.discard(_identity(file.fileno()))
            with contextlib.suppress(OSError):
                file.truncate()
            # Closing does not unlock while a process that was forked meanwhile has it open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep `alone` out of ``path`` while the block runs, along with any number of other readers.

    If the file can be neither made nor read, as on a disk that is read-only, no other process can
    remove anything either, and the block runs without it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            try:
                descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
            except OSError:
                descriptor = open_private(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Run the block while no process is `reading`; the value is false if one is."""
    descriptor = _opened(path)
    with os.fdopen(descriptor, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise BractError(
                f"{path}: this file system has no locks ({one_line(error, 200)})",
                code="file-unwritable",
            ) from error
        yield True


def holder(path: Path) -> str | None:
    """Return which other process holds a lock, None if none does."""
    try:
        with path.open("rb") as file:
            if _identity(file.fileno()) in _mine:
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _described(file.read(4096))
    except OSError:
        return None
    return None


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _refusal(what: str, path: Path) -> str:
    try:
        who = _described(path.read_bytes()[:4096])
    except OSError:
        who = _described(b"")
    return f"{what}: {who} is working on it; wait until it has ended, or end it, then try again"


def _described(content: bytes) -> str:
    try:
        about = json.loads(content)
        pid, host = int(about["pid"]), str(about["host"])
        doing = one_line(str(about["doing"]), 200)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    where = "" if host == socket.gethostname() else f" on {one_line(host, 60)}"
    return f"process {pid}{where} ({doing})"


def _opened(path: Path) -> int:
    """Return the descriptor of a lock's file, made where there is none."""
    try:
        return open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise BractError(
            f"{path}: cannot be written: {one_line(error, 200)}", code="file-unwritable"
        ) from error
