"""``bract pack`` and ``bract pull``: what of a run may leave the server, in one file.

A pack is an uncompressed tar of regular files: ``pack.json`` first, with the size and SHA-256 of
every other, and of these only those in `MOST`. Nothing else is ever packed and nothing else is
taken: no capture, no truth, no key, no picture. It comes from another machine, so the reader knows
every name and every size before it reads a byte of content, and keeps all of it or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal

from pydantic import Field
from safetensors import SafetensorError, safe_open

import bract
from bract.cli.console import say
from bract.errors import BractError, one_line
from bract.files import readable_size, replacing, write_bytes, write_text
from bract.rundir import RunDirectory
from bract.schema import MetricsRow, Record, RecordError, Report, VersionedRecord
from bract.schema.record import MOST_BYTES
from bract.strict_json import dump_json

REPORT, METRICS, MODEL, LAST = (
    "report.json",
    "metrics.jsonl",
    "final.safetensors",
    "last.safetensors",
)

MOST = {REPORT: MOST_BYTES, METRICS: MOST_BYTES, MODEL: 1 << 33, LAST: 1 << 33}
"""Files of a pack, with the bytes of the largest that is read; a tar header holds 8 GiB."""

PAGE = "report.html"
"""Written here from the report: no page that another machine made is taken."""

_CONTENTS = "pack.json"
_MOST_CONTENTS = 1 << 14
_BLOCK = 512
_PIECE = 1 << 20


Content = io.BufferedReader | io.BytesIO


class PackError(BractError):
    """A pack that cannot be taken as it is; nothing of it was kept."""


class Packed(Record):
    """One file of a pack."""

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Contents(VersionedRecord):
    """``pack.json``: whose run this is, and what follows."""

    kind: ClassVar[str] = "pack"
    mend: ClassVar[str] = "pack and pull with the same version of bract"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    bract: str
    run: str
    files: dict[str, Packed]


def pack(root: Path, out: str) -> None:
    """Write what of a run may leave this machine to a file, or to stdout where ``out`` is ``-``.

    Raises
    ------
    BractError
        If ``root`` is no run, or nothing of it may leave.
    """
    run = RunDirectory.open(root)
    if out == "-" and sys.stdout.isatty():
        raise BractError("--out -: stdout is a terminal; lead it to `bract pull -` or into a file")
    with contextlib.ExitStack() as stack:
        files = _chosen(run, stack)
        if not files:
            raise BractError(f"{run.root}: holds no report, metrics or model to pack yet")
        contents = Contents(
            bract=bract.__version__,
            run=run.config().name if run.is_configured else run.root.resolve().name,
            files={name: _described(file) for name, file in files.items()},
        )
        if out == "-":
            _write(sys.stdout.buffer, contents, files)
        else:
            _write_file(Path(out), contents, files)
    say(f"done: {', '.join(files)} of {run.root}; next, elsewhere: bract pull {out} --out DIR")


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
        raise BractError(f"{out}: is there already; name a folder that is not")
    try:
        opened: BinaryIO = sys.stdin.buffer if source == "-" else Path(source).open("rb")  # noqa: SIM115
    except OSError as error:
        raise BractError(f"{source}: cannot be read: {error.strerror or error}") from error
    with opened, replacing(out) as folder:
        folder.mkdir(mode=0o700)
        return _take(_Pack(opened, "stdin" if source == "-" else source), folder)


def _chosen(run: RunDirectory, stack: contextlib.ExitStack) -> dict[str, Content]:
    """Return what is packed, by the names in the pack; a file that is replaced meanwhile stays."""
    files: dict[str, Content] = {}
    report = _redacted(run)
    if report is not None:
        files[REPORT] = io.BytesIO(report)
    if run.metrics():
        text = "".join(f"{row.model_dump_json(by_alias=True)}\n" for row in run.metrics())
        files[METRICS] = io.BytesIO(text.encode())
    for name in (MODEL, LAST):
        with contextlib.suppress(FileNotFoundError):
            files[name] = stack.enter_context((run.models / name).open("rb"))
            break
    return files


def _redacted(run: RunDirectory) -> bytes | None:
    """Return the redacted report, which is made now: what lies in the run may show pictures."""
    try:
        from bract.report import gather
    except ModuleNotFoundError:
        say("warning: without the report, which this installation cannot make; pack where it can")
        return None
    return dump_json(gather(run.root).redact().to_dict(), ascii_only=False).encode()


def _described(file: Content) -> Packed:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return Packed(size=size, sha256=digest)


def _write_file(out: Path, contents: Contents, files: dict[str, Content]) -> None:
    with replacing(out) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _write(file, contents, files)


def _write(to: BinaryIO, contents: Contents, files: dict[str, Content]) -> None:
    text = dump_json(contents.to_dict()).encode()
    with tarfile.open(fileobj=to, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(_entry(_CONTENTS, len(text)), io.BytesIO(text))
        for name, file in files.items():
            archive.addfile(_entry(name, contents.files[name].size), file)
    to.flush()


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry


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
            raise packed.error(f"{name} does not come where {_CONTENTS} says")
        _store(packed, expected, folder / name)
    if packed.next() is not None:
        raise packed.error(f"holds more than {_CONTENTS} says")
    for name, check in _CHECKS.items():
        if name in contents.files:
            try:
                check(folder / name)
            except (RecordError, SafetensorError, UnicodeDecodeError, ValueError) as error:
                raise packed.error(f"{name}: {one_line(error, 300)}") from error
    return contents


def _contents(packed: _Pack) -> Contents:
    entry = packed.next()
    if entry is None or entry.name != _CONTENTS or not 0 < entry.size <= _MOST_CONTENTS:
        raise packed.error(f"is no pack of `bract pack`: it begins with no {_CONTENTS}")
    text = b"".join(packed.content(entry.size))
    contents = Contents.parse_text(text, source=f"{packed.source}: {_CONTENTS}")
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
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
    text = dump_json(report.to_dict(), ascii_only=False)
    write_text(path, text + "\n", private=True)
    write_text(path.with_name(PAGE), render(path.parent, report), private=True)


def _check_metrics(path: Path) -> None:
    rows = [
        MetricsRow.parse_text(line, source=path.name) for line in path.read_bytes().splitlines()
    ]
    text = "".join(f"{row.model_dump_json(by_alias=True)}\n" for row in rows)
    write_bytes(path, text.encode(), private=True)


def _check_model(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        file.keys()


_CHECKS: dict[str, Callable[[Path], None]] = {
    REPORT: _check_report,
    METRICS: _check_metrics,
    MODEL: _check_model,
    LAST: _check_model,
}
