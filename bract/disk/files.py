"""Write files whole: under a temporary name of their own first, then renamed.

A reader sees the earlier content or the new one, never a part. The temporary name is drawn at
random and created exclusively, so no link that another user planted is followed. A file of lines
of JSON grows by `append_line`. Other users cannot read what is written (`bract.disk.permissions`).
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError

from bract.disk.permissions import make_private_folder, open_private
from bract.errors import BractError, WriteFailedError, one_line


def write_bytes(path: Path, content: bytes | mmap.mmap, *, private: bool = False) -> Path:
    """Write a file whole and return its path.

    Parameters
    ----------
    private
        Whether the owner alone may read it, also where ``BRACT_GROUP`` names a group; for keys and
        a client's own state.

    Raises
    ------
    WriteFailedError
        If it cannot be written, naming the file, what was needed and what is free; an earlier
        file of that name is then still there, and nothing else is left.
    """
    return write_pieces(path, [content], private=private)


def write_pieces(path: Path, pieces: Sequence[bytes | mmap.mmap], *, private: bool = False) -> Path:
    """Write a file of several pieces, one after the other, as `write_bytes` does."""
    size = sum(len(piece) for piece in pieces)
    with replacing(path, size=size, private=private) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = open_private(temporary, flags, private=private)
        with os.fdopen(descriptor, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    return path


def write_text(path: Path, text: str, *, private: bool = False) -> Path:
    """Write text as UTF-8, as `write_bytes` does; lone surrogates are written as escapes."""
    return write_bytes(path, text.encode("utf-8", errors="backslashreplace"), private=private)


@contextlib.contextmanager
def replacing(path: Path, *, size: int | None = None, private: bool = False) -> Iterator[Path]:
    """Give a temporary name in ``path``'s folder; its file becomes ``path`` at the end.

    It may be made a file or a folder; an earlier folder of that name is removed. A device is not:
    it would be gone for every program of this machine.

    Parameters
    ----------
    size
        Bytes that are going to be written, for the error message.
    private
        Whether folders above it that are missing are their owner's alone. A client's own state is
        then on the disk under its name, too: an account that a power cut takes back is none.

    Raises
    ------
    WriteFailedError
        If writing or renaming fails; what was made under the temporary name is removed.
    """
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.tmp")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError("it is a pipe, a device or a socket, which stays; name a file")
        make_private_folder(path.parent, private=private)
        yield temporary
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        temporary.replace(path)
        if private:
            _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise write_failed(path, error, size) from error
    finally:
        with contextlib.suppress(OSError):
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_devices(folder: Path) -> None:
    """Refuse a folder of another party that holds what no reader of it would come to an end of.

    Opening a named pipe waits for a writer, and a device has no end; a link to one is one.

    Raises
    ------
    BractError
        With the path of the first that is found.
    """
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)  # noqa: PTH118 - thousands of files
            with contextlib.suppress(OSError):
                mode = os.stat(path).st_mode  # noqa: PTH116
                if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    raise BractError(
                        f"{path}: a named pipe or a device; expected a file, so remove it",
                        code="file-damaged",
                    )


def append_line(path: Path, line: str, *, private: bool = False) -> None:
    """Append one line of text and see it on the disk.

    What a writer that was killed left of a last line is removed first, unless only its end is
    missing: the new line does not continue it.

    Raises
    ------
    WriteFailedError
        If it cannot be written; the file then ends as it did.
    """
    content = line.encode("utf-8", errors="backslashreplace") + b"\n"
    try:
        make_private_folder(path.parent, private=private)
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT, private=private)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            end = _end_of_lines(file)
            try:
                file.seek(end)
                file.truncate()
                written = 0
                while written < len(content):
                    written += file.write(content[written:])
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise write_failed(path, error, len(content)) from error


def _end_of_lines(file: io.FileIO) -> int:
    """Return where the last whole line ends; the end is put to one that lacks only that."""
    size = start = file.seek(0, os.SEEK_END)
    rest = b""
    while start and b"\n" not in rest:
        start = max(0, start - (1 << 16))
        file.seek(start)
        rest = file.read(size - start)
    rest = rest[rest.rfind(b"\n") + 1 :]
    end = size - len(rest)
    if not rest:
        return end
    try:
        json.loads(rest)
    except (ValueError, RecursionError):
        return end
    file.write(b"\n")
    return size + 1


def write_failed(path: Path, error: Exception, size: int | None = None) -> WriteFailedError:
    """Return the error that names the file, what was needed (bytes) and what is free."""
    return WriteFailedError(_reason(path, error, size))


def _reason(path: Path, error: Exception, size: int | None) -> str:
    text = f"{path}: cannot be written: {one_line(error)}"
    needed = "" if size is None else f"{readable_size(size)} needed, "
    with contextlib.suppress(OSError):
        folder = next(p for p in (path.parent, *path.parents) if p.is_dir())
        text += f" ({needed}{readable_size(shutil.disk_usage(folder).free)} free)"
    return text


def utf8(path: Path) -> str:
    """Return an absolute path as text for a process that reads paths as UTF-8.

    In a locale that has less than that, Python holds a path's other bytes as lone surrogates.
    """
    return os.fsencode(path.absolute()).decode("utf-8", errors="surrogateescape")


def readable_size(size: float) -> str:
    """Return a number of bytes for a person, such as ``3.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
