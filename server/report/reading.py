"""Read a run directory, whole or half-finished: what is broken is named and left out."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from bract.config import FederationConfig, load_config
from bract.errors import BractError, SchemaError
from bract.observation import SCHEMA_VERSION, ObservationStore
from bract.server.report.schema import (
    AUDIT_SCHEMA,
    RUN_SCHEMA,
    AuditFile,
    CaptureFile,
    MetricsRow,
    RunFile,
)

_log = logging.getLogger(__name__)

_Record = TypeVar("_Record", bound=BaseModel)


@dataclass
class RunFiles:
    """What a run directory holds.

    Attributes
    ----------
    run, config
        None where the file is missing or cannot be read.
    config_sha256
        Of the bytes of ``config.yaml``.
    metrics
        One row a round, by round; where a round occurs twice the later line counts.
    audits
        Folder name under ``audit/`` and content, by attack, round and client.
    skipped
        Files that could not be used: path relative to the run directory, and the reason.
    """

    root: Path
    run: RunFile | None = None
    config: FederationConfig | None = None
    config_sha256: str | None = None
    metrics: list[MetricsRow] = field(default_factory=list)
    captures: list[CaptureFile] = field(default_factory=list)
    audits: list[tuple[str, AuditFile]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, path: Path, reason: object) -> None:
        """Record and log a file that cannot be used."""
        name = path.relative_to(self.root).as_posix()
        text = " ".join(str(reason).split())
        self.skipped.append((name, text))
        _log.warning("skipped %s: %s", name, text)


def read_run(root: Path) -> RunFiles:
    """Read what there is of a run directory.

    Raises
    ------
    BractError
        If ``root`` is no run directory.
    SchemaError
        If a file has another schema version than this one reads.
    """
    if not root.is_dir():
        raise BractError(f"{root}: no such run directory")
    parts = ("run.json", "config.yaml", "metrics.jsonl", "captures", "audit")
    if not any((root / part).exists() for part in parts):
        raise BractError(
            f"{root}: not a run directory; expected {', '.join(parts[:-1])} or {parts[-1]} in it"
        )
    files = RunFiles(root)
    if (root / "run.json").exists():
        files.run = _load(files, root / "run.json", RunFile, RUN_SCHEMA, "run")
    _read_config(files)
    _read_metrics(files)
    for folder in ObservationStore(root / "captures").folders():
        capture = _load(
            files, folder / "observation.json", CaptureFile, SCHEMA_VERSION, "observation"
        )
        if capture:
            files.captures.append(capture)
    for path in sorted((root / "audit").glob("*/*.json")):
        audit = _load(files, path, AuditFile, AUDIT_SCHEMA, "audit")
        if audit:
            files.audits.append((path.parent.name, audit))
    return files


def _read_config(files: RunFiles) -> None:
    path = files.root / "config.yaml"
    if not path.exists():
        return
    try:
        files.config_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        files.config = load_config(path)
    except (OSError, BractError) as error:
        files.skip(path, error)


def _read_metrics(files: RunFiles) -> None:
    path = files.root / "metrics.jsonl"
    if not path.exists():
        return
    rows: dict[int, MetricsRow] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        files.skip(path, error)
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = MetricsRow.model_validate(json.loads(line))
        except ValueError as error:
            files.skip(path, f"line {number} is half-written or corrupted ({_first(error)})")
        else:
            rows[row.round] = row
    files.metrics = [rows[number] for number in sorted(rows)]


def _load(
    files: RunFiles, path: Path, record: type[_Record], wanted: int, what: str
) -> _Record | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, found a {type(content).__name__}")
        found = content.get("schema")
        if found != wanted:
            raise SchemaError(
                f"{path}: {what} schema {'missing' if found is None else found}, this version "
                f"reads {wanted}; run it again or use the bract version that wrote it"
            )
        return record.model_validate(content)
    except (OSError, ValueError) as error:
        files.skip(path, f"half-written or corrupted ({_first(error)})")
        return None


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
    return str(error) if not isinstance(error, OSError) else error.strerror or str(error)
