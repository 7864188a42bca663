"""``bract pull``: take a pack of `bract.cli.packing` from another machine, whole or not at all.

Every name and every size is known before a byte of content is read, and nothing is opened that
another machine made but records, which are written anew, and tensors.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from bract.cli.packing import CONTENTS, LAST, METRICS, MODEL, MOST, REPORT, Contents, Packed
from bract.disk.files import readable_size, replacing, write_bytes, write_text
from bract.disk.named import open_named, unreadable
from bract.disk.permissions import make_private_folder, open_private
from bract.errors import BractError, one_line
from bract.schema import Report
from bract.schema.metrics import MetricsRow
from bract.schema.record import RecordError

PAGE = "report.html"
"""Written here from the report: no page that another machine made is taken."""

_MOST_CONTENTS = 1 << 14
_BLOCK = 512
_PIECE = 1 << 20


class PackError(BractError):
    """A pack that cannot be taken as it is; nothing of it was kept."""

    code = "file-damaged"


def pull(source: str, out: Path) -> Contents:
    """Read a pack from a file, or from stdin where ``source`` is ``-``, into a new folder.

    Raises
    ------
    PackError
        If it is no pack, damaged, cut short, or holds anything that it must not.
    BractError
        If the folder is there already.
    """
    if out.exists() or out.is_symlink():
        raise BractError(f"{out}: is there already; name a folder that is not", code="file-taken")
    try:
        opened: BinaryIO = sys.stdin.buffer if source == "-" else open_named(Path(source))
    except OSError as error:
        raise unreadable(source, error, BractError) from error
    with opened, replacing(out) as folder:
        make_private_folder(folder)
        return _take(_Pack(opened, "stdin" if source == "-" else source), folder)


class _Pack:
    """Read a tar that has nothing but regular files, without what its format allows besides."""

    def __init__(self, file: BinaryIO, source: str) -> None:
        self._file = file
        self.source = source

    def next(self) -> tarfile.TarInfo | None:
        """Return the next entry, None at the end."""
        block = self._read(_BLOCK)
        if not block.strip(b"\0"):
            self._file.read(_PIECE)  # padding: who writes it into a pipe is to finish
            return None
        try:
            entry = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.TarError, ValueError) as error:
            raise self.error(f"is no pack of `bract pack` ({one_line(error, 100)})") from error
        if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise self.error("holds something that is no regular file")
        return entry

    def content(self, size: int) -> Iterator[bytes]:
        """Return an entry's bytes in pieces."""
        left = size
        while left:
            piece = self._read(min(left, _PIECE))
            left -= len(piece)
            yield piece
        self._read(-size % _BLOCK)

    def error(self, what: str) -> PackError:
        """Return the error that names the pack."""
        return PackError(f"{self.source}: {what}; nothing of it was kept")

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = self._file.read(size - len(found))
            if not piece:
                raise self.error(
                    "ends before the pack does; look for an error of the command that made it"
                )
            found += piece
        return found


def _take(packed: _Pack, folder: Path) -> Contents:
    contents = _contents(packed)
    for name, expected in contents.files.items():
        entry = packed.next()
        if entry is None or (entry.name, entry.size) != (name, expected.size):
            raise packed.error(f"{name} is not in the place that {CONTENTS} gives")
        _store(packed, expected, folder / name)
    if packed.next() is not None:
        raise packed.error(f"holds more than {CONTENTS} lists")
    for name, check in _CHECKS.items():
        if name in contents.files:
            try:
                check(folder / name)
            except (RecordError, SafetensorError, UnicodeDecodeError, ValueError) as error:
                raise packed.error(f"{name}: {one_line(error, 300)}") from error
    return contents


def _contents(packed: _Pack) -> Contents:
    entry = packed.next()
    if entry is None or entry.name != CONTENTS or not 0 < entry.size <= _MOST_CONTENTS:
        raise packed.error(f"is no pack of `bract pack`: it begins with no {CONTENTS}")
    text = b"".join(packed.content(entry.size))
    contents = Contents.parse_text(text, source=f"{packed.source}: {CONTENTS}")
    for name, file in contents.files.items():
        if name not in MOST:
            raise packed.error(f"offers {one_line(name, 80)!r}, expected only {', '.join(MOST)}")
        if file.size > MOST[name]:
            raise packed.error(
                f"{name} has {readable_size(file.size)}, expected {readable_size(MOST[name])} at "
                "most"
            )
    return contents


def _store(packed: _Pack, expected: Packed, path: Path) -> None:
    digest = hashlib.sha256()
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "wb") as file:
        for piece in packed.content(expected.size):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != expected.sha256:
        raise packed.error(f"{path.name} is not what was packed: its SHA-256 differs")


def _check_report(path: Path) -> None:
    """Redact the report once more, and write the page from it."""
    from bract.report.page.render import render

    report = Report.parse_text(path.read_bytes(), source=path.name)
    if not report.redacted:
        raise ValueError("it is not redacted")
    report = report.redact()
    text = report.to_text(ascii_only=False)
    write_text(path, text + "\n")
    write_text(path.with_name(PAGE), render(path.parent, report))


def _check_metrics(path: Path) -> None:
    rows = [
        MetricsRow.parse_text(line, source=path.name) for line in path.read_bytes().splitlines()
    ]
    text = "".join(f"{row.model_dump_json(by_alias=True)}\n" for row in rows)
    write_bytes(path, text.encode())


def _check_model(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        file.keys()


_CHECKS: dict[str, Callable[[Path], None]] = {
    REPORT: _check_report,
    METRICS: _check_metrics,
    MODEL: _check_model,
    LAST: _check_model,
}
