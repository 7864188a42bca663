"""``bract pack``: write what of a run may leave the server to one file.

A pack is an uncompressed tar of regular files: ``pack.json`` first, with the size and SHA-256 of
every other, and of these only those in `MOST`. Nothing else is ever packed: no capture, no truth,
no key, no picture. `bract.cli.unpacking` reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal

from pydantic import Field
from safetensors import SafetensorError, safe_open

import bract
from bract.cli.console import say
from bract.disk.files import readable_size, replacing
from bract.disk.permissions import open_private
from bract.errors import BractError, one_line
from bract.rundir import RunDirectory
from bract.schema.record import MOST_BYTES, Record, VersionedRecord

REPORT, METRICS = "report.json", "metrics.jsonl"
MODEL, LAST = "final.safetensors", "last.safetensors"

_LARGEST = (1 << 33) - 1
"""Bytes of the largest file that a plain tar header can announce."""

MOST = {REPORT: MOST_BYTES, METRICS: MOST_BYTES, MODEL: _LARGEST, LAST: _LARGEST}
"""Files of a pack, with the bytes of the largest that is written or read."""

CONTENTS = "pack.json"

Content = io.BufferedReader | io.BytesIO


class Packed(Record):
    """One file of a pack."""

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Contents(VersionedRecord):
    """``pack.json``: whose run this is, and what follows."""

    kind: ClassVar[str] = "pack"
    remedy: ClassVar[str] = "pack and pull with the same version of bract"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    bract: str
    run: str
    files: dict[str, Packed]


def pack(root: Path, out: str) -> None:
    """Write what of a run may leave this machine to a file, or to stdout where ``out`` is ``-``."""
    run = RunDirectory.open(root)
    if out == "-" and sys.stdout.isatty():
        raise BractError(
            "--out -: stdout is a terminal; lead it to `bract pull -` or into a file", code="usage"
        )
    with contextlib.ExitStack() as stack:
        files = _chosen(run, stack)
        if not files:
            raise BractError(
                f"{run.root}: holds no report, metrics or model to pack yet", code="file-missing"
            )
        if not any(run.audit.glob("*")):
            say(
                f"warning: {run.root} was not audited, so this pack has no figures of leaks; "
                f"first: bract audit {run.root}"
            )
        contents = Contents(
            bract=bract.__version__,
            run=run.config().name if run.is_configured else run.root.resolve().name,
            files={name: _described(name, file) for name, file in files.items()},
        )
        if out == "-":
            _write(sys.stdout.buffer, contents, files)
        else:
            _write_file(Path(out), contents, files)
    say(f"done: {', '.join(files)} of {run.root}; next, elsewhere: bract pull {out} --out DIR")


def _chosen(run: RunDirectory, stack: contextlib.ExitStack) -> dict[str, Content]:
    """Return the pack's content, by name; a file that is replaced meanwhile stays."""
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
            _check_model(run.models / name)
            break
    return files


def _check_model(path: Path) -> None:
    """Refuse what is no model, such as what a link in another's run leads to."""
    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except SafetensorError as error:
        raise BractError(
            f"{path}: no model in safetensors ({one_line(error, 100)}), so it is not packed; "
            "restore it, or move it out of the run",
            code="file-damaged",
        ) from None


def _redacted(run: RunDirectory) -> bytes | None:
    """Return the redacted report, which is made now: that of the run may show pictures."""
    try:
        from bract.report.facts import gather
    except ModuleNotFoundError:
        say("warning: without the report, which this installation cannot make; pack where it can")
        return None
    return gather(run.root).redact().to_text(ascii_only=False).encode()


def _described(name: str, file: Content) -> Packed:
    size = file.seek(0, os.SEEK_END)
    if size > MOST[name]:
        raise BractError(
            f"{name} has {readable_size(size)}, and a pack takes {readable_size(MOST[name])}; copy "
            "it by itself (scp)",
            code="file-unreadable",
        )
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return Packed(size=size, sha256=digest)


def _write_file(out: Path, contents: Contents, files: dict[str, Content]) -> None:
    with replacing(out) as temporary:
        descriptor = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            _write(file, contents, files)


def _write(to: BinaryIO, contents: Contents, files: dict[str, Content]) -> None:
    text = contents.to_text().encode()
    with tarfile.open(fileobj=to, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(_entry(CONTENTS, len(text)), io.BytesIO(text))
        for name, file in files.items():
            archive.addfile(_entry(name, contents.files[name].size), file)
    to.flush()


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry
