"""Folders and files that other users of the machine cannot read, whatever the umask.

Captures, reports and models hold what clients trained on. Folders get mode 0700 and files 0600. An
operator who sets ``BRACT_GROUP`` lets the members of one group read: folders get mode 2750 and
files 0640. Keys and a client's own state stay their owner's alone.
"""

from __future__ import annotations

import functools
import grp
import logging
import os
import shlex
import stat
from pathlib import Path

from bract.errors import BractError, one_line, shown

GROUP = "BRACT_GROUP"
"""Environment variable with the group, by name or number, whose members may read."""

UMASK = 0o077
"""For processes in which other software writes files."""

_FOLDER, _FILE = 0o700, 0o600
_GROUP_FOLDER, _GROUP_FILE = 0o2750, 0o640
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_log = logging.getLogger(__name__)
_warned: set[Path] = set()


def make_private_folder(folder: Path, *, private: bool = False) -> Path:
    """Make a folder and the missing ones above it; return it. One that exists stays as it is.

    Parameters
    ----------
    private
        Whether it is its owner's alone, also where ``BRACT_GROUP`` names a group.
    """
    try:
        folder.mkdir(_FOLDER)
    except FileNotFoundError:
        make_private_folder(folder.parent, private=private)
        return make_private_folder(folder, private=private)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return folder
    group = None if private else _group()
    if group is not None:
        _give(group, folder, _GROUP_FOLDER)
    return folder


def open_private(path: Path | str, flags: int, *, private: bool = False) -> int:
    """Open a file as `os.open` does, without following a link; a new one is not for others.

    Serves as the ``opener`` of the built-in `open`.

    Parameters
    ----------
    private
        Whether a new file is its owner's alone, also where ``BRACT_GROUP`` names a group.
    """
    group = None if private or not flags & os.O_CREAT else _group()
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE)
    if group is not None and os.fstat(descriptor).st_uid == os.geteuid():
        try:
            _give(group, descriptor, _GROUP_FILE)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def warn_if_open(path: Path) -> bool:
    """Log once that other users can read a folder or file, and how to change that.

    Below a folder that they cannot enter, everything is closed to them.

    Returns
    -------
    bool
        Whether it was logged now.
    """
    try:
        whole = path.resolve(strict=True)
        found = whole.stat()
        closed = any(not above.stat().st_mode & _ENTER for above in whole.parents)
    except OSError:
        return False
    theirs = found.st_mode & _OTHERS
    if theirs and os.environ.get(GROUP) and found.st_gid == _group():
        theirs &= ~(stat.S_IRGRP | stat.S_IXGRP)
    if not theirs or closed or whole in _warned:
        return False
    _warned.add(whole)
    _log.warning(
        "%s: other users of this machine may read it (mode %04o); close it with: chmod -R go= %s",
        path,
        stat.S_IMODE(found.st_mode),
        shlex.quote(str(whole)),
    )
    return True


_ENTER = stat.S_IXGRP | stat.S_IXOTH


def _group() -> int | None:
    named = os.environ.get(GROUP)
    return _number_of(named) if named else None


@functools.cache
def _number_of(named: str) -> int:
    try:
        return int(named) if named.isdecimal() else grp.getgrnam(named).gr_gid
    except (KeyError, ValueError) as error:
        raise BractError(
            f"{GROUP}={shown(named)}: no such group on this machine; name one that `getent group` "
            "lists, or unset it to keep files to their owner",
            code="unknown-name",
        ) from error


def _give(group: int, what: Path | int, mode: int) -> None:
    try:
        os.chown(what, -1, group)
        os.chmod(what, mode)  # noqa: PTH101 - a descriptor, too
    except PermissionError as error:
        raise BractError(
            f"{GROUP}={os.environ[GROUP]}: this user cannot give files to that group "
            f"({one_line(error, 200)}); add the user to it, or unset {GROUP}",
            code="file-unwritable",
        ) from error
