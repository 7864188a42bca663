"""Errors of the operating system in words: what was found, and what to do.

Python's own text (``[Errno 2] No such file or directory: 'x'``) is for who wrote the program.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

_FULL = "the disk is full; free some space"
_DENIED = "this user has no permission; change its owner or mode"
_SILENT = "nothing answers there; see that it is started, and that the address is right"

_WORDS = {
    errno.ENOENT: "no such file or folder; check the path",
    errno.EISDIR: "it is a folder, expected a file; name a file",
    errno.ENOTDIR: "a part of the path is a file, expected a folder; check the path",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EEXIST: "something of that name is there already; remove it, or choose another name",
    errno.ENOTEMPTY: "the folder is not empty; empty it, or choose another one",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "this user's share of the disk is full; free some space",
    errno.EFBIG: "the file would be larger than this disk or user may hold; free some space",
    errno.EROFS: "the disk is read-only; choose a folder on another one",
    errno.EIO: "the disk, or the network it is on, failed; see the system's log",
    errno.ESTALE: "the network's disk lost the file; try again",
    errno.EMFILE: "this process has too many files open; raise `ulimit -n`",
    errno.ENFILE: "this machine has too many files open; raise its limit",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "its links lead in a circle; remove one",
    errno.EINVAL: "the operating system takes no such request there; choose another place",
    errno.ENXIO: "it is a device or a pipe without a reader; name a file",
    errno.EXDEV: "it is on another disk; choose a folder on the same one",
    errno.ENOMEM: "memory is used up; free some",
    errno.ENOLCK: "this disk has no locks; choose a folder on another one",
    errno.ENOTSUP: "this disk cannot do that; choose a folder on another one",
    errno.EADDRINUSE: "another program listens there; end it, or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose one that it has",
    errno.ECONNREFUSED: _SILENT,
    errno.ECONNRESET: "the other side ended the connection; try again",
    errno.ECONNABORTED: "the other side ended the connection; try again",
    errno.EPIPE: "the other side ended the connection; try again",
    errno.ETIMEDOUT: _SILENT,
    errno.EHOSTUNREACH: "no way leads to that machine; check network and address",
    errno.ENETUNREACH: "no way leads to that network; check network and address",
}
"""Words for what was found and what to do, by error number."""

_NUMBER = re.compile(r"\(os error (\d+)\)")


def in_words(error: BaseException) -> str:
    """Return what an error says; one of the operating system, or of its text, in plain words.

    Other errors are returned as they read. So is an error of the operating system that a library
    raised with a text of its own.
    """
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start : error.start + 1].hex()
        return f"byte {error.start + 1} is 0x{byte}, expected UTF-8 text; save it as UTF-8"
    if isinstance(error, ssl.SSLError):  # its numbers are not the operating system's
        return text_of(error)
    if isinstance(error, socket.gaierror):
        return "no machine of that name is known; check the address"
    number = _number(error)
    if number is None:
        return text_of(error)
    if number in _WORDS:
        return _WORDS[number]
    return f"the operating system says: {os.strerror(number).lower()}"


def text_of(error: BaseException) -> str:
    """Return an error's own text; of one whose text cannot be had, that it cannot."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - code of whoever wrote the error
        return "its text cannot be read"
    return text


def _number(error: BaseException) -> int | None:
    """Return the number of the operating system's error, also where a library has it as text."""
    if isinstance(error, OSError) and type(error.errno) is int:
        return error.errno
    text = text_of(error)
    if (found := _NUMBER.search(text)) is not None:  # of a library in Rust
        return int(found[1])
    if isinstance(error, OSError):
        return next((n for n in _WORDS if text.startswith(os.strerror(n))), None)
    return errno.ETIMEDOUT if isinstance(error, TimeoutError) and not text else None
