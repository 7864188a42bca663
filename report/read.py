"""Read a run directory, whole or half-finished: what is broken is named and left out."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bract.audit.questions.rules import RULES
from bract.audit.uncaptured import read_claims, read_left, read_missed, read_removed
from bract.captures.captured import CaptureRecords
from bract.config import FederationConfig, load_config
from bract.errors import BractError, SchemaError
from bract.rundir import QUESTIONS_FOLDER, RunDirectory, captures_in
from bract.schema import Answer, AuditResult, ObservationFile
from bract.schema.capture import MissedCapture, RemovedRound
from bract.schema.claims import ProtectionClaim
from bract.schema.description import DESCRIPTION, AppDescription
from bract.schema.description_text import read_description
from bract.schema.left import LeftReply
from bract.schema.metrics import MetricsRow
from bract.schema.record import RecordError, VersionedRecord
from bract.schema.run import RunState

_log = logging.getLogger(__name__)

_Versioned = TypeVar("_Versioned", bound=VersionedRecord)


_BESIDE = ("run.json", "metrics.jsonl")
"""Files of which no verdict takes anything; it takes its rule of the configuration."""


@dataclass
class RunFiles:
    """Contents of a run directory.

    Attributes
    ----------
    run, config
        None where the file is missing or cannot be read.
    config_sha256
        Of the bytes of ``config.yaml``.
    description
        ``bract.yaml``; it overrides what the captures declare.
    metrics
        One row a round, by round; where a round occurs twice the later line counts.
    audits
        Folder name under ``audit/`` and content, by attack, round and client.
    missed
        Replies that the server held and did not write down.
    removed
        Captured rounds that gave way to later ones.
    left
        What every reply held, whatever message it answered.
    claims
        What the server's strategy and the app's code claim of their protection.
    answers
        Answers to other questions than reconstruction.
    skipped
        Files that could not be used: path relative to the run directory, and the reason.
    """

    root: Path
    run: RunState | None = None
    config: FederationConfig | None = None
    config_sha256: str | None = None
    description: AppDescription | None = None
    metrics: list[MetricsRow] = field(default_factory=list)
    captures: list[ObservationFile] = field(default_factory=list)
    audits: list[tuple[str, AuditResult]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    missed: list[MissedCapture] = field(default_factory=list)
    removed: list[RemovedRound] = field(default_factory=list)
    left: list[LeftReply] = field(default_factory=list)
    claims: list[ProtectionClaim] = field(default_factory=list)

    @property
    def unread(self) -> list[str]:
        """Names of the skipped files on which a page rests: results, uploads, what left, claims."""
        return list(dict.fromkeys(name for name, _ in self.skipped if name not in _BESIDE))

    def skip(self, path: Path, reason: object) -> None:
        """Record and log a file that cannot be used."""
        name = path.relative_to(self.root).as_posix()
        text = " ".join(str(reason).split())
        self.skipped.append((name, text))
        _log.warning("skipped %s: %s", name, text)


def read_run(root: Path) -> RunFiles:
    """Read the files of a run directory; missing ones are left out."""
    if not root.is_dir():
        raise BractError(f"{root}: no such run directory", code="file-missing")
    parts = ("run.json", "config.yaml", "metrics.jsonl", "captures", "audit")
    store = CaptureRecords(captures_in(root))
    if not any((root / part).exists() for part in parts) and not store.folders():
        raise BractError(
            f"{root}: not a run directory; expected {', '.join(parts[:-1])} or {parts[-1]} in it",
            code="file-missing",
        )
    files = RunFiles(root)
    if (root / "run.json").exists():
        files.run = _read(files, root / "run.json", RunState)
        if files.run is not None:
            files.run = RunDirectory(root).true(files.run)
    _read_config(files)
    _read_metrics(files)
    try:
        files.description = read_description(root)
    except BractError as error:
        files.skip(root / DESCRIPTION, str(error).removeprefix(f"{root / DESCRIPTION}: "))
    with store.reading():
        for folder in store.folders():
            try:
                files.captures.append(_described(store.describe(folder), files.description))
            except SchemaError:
                raise
            except BractError as error:
                files.skip(folder / "observation.json", str(error).removeprefix(f"{folder}: "))
    files.missed = read_missed(store.root, files.skip)
    files.removed = read_removed(store.root, files.skip)
    files.left = read_left(store.root, files.skip)
    files.claims = read_claims(store.root, files.skip)
    for path in sorted((root / "audit").glob("*/*.json")):
        audit = _read(files, path, AuditResult)
        if audit:
            files.audits.append((path.parent.name, audit))
    _read_answers(files)
    return files


def _read_answers(files: RunFiles) -> None:
    for path in sorted((files.root / "audit" / QUESTIONS_FOLDER).glob("*/*.json")):
        name = path.parent.name
        named = [q for q in RULES if f"{name}-".startswith(f"{q}-")]
        rule = RULES.get(max(named, key=len)) if named else None
        if rule is None:
            known = ", ".join(RULES)
            files.skip(path, f"no question of that name is installed; known: {known}")
        elif answer := _read(files, path, rule.answer):
            files.answers.append(answer)


def _described(capture: ObservationFile, description: AppDescription | None) -> ObservationFile:
    if description is None:
        return capture
    declaration = description.declare(capture.declaration, capture.client)
    return capture.model_copy(update={"declaration": declaration})


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
        lines = path.read_bytes().splitlines()
    except OSError as error:
        files.skip(path, error)
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = MetricsRow.parse_text(line, source=f"{path}: line {number}")
        except RecordError as error:
            files.skip(path, f"line {number} is half-written or corrupted ({error.detail})")
        else:
            rows[row.round] = row
    files.metrics = [rows[number] for number in sorted(rows)]


def _read(files: RunFiles, path: Path, record: type[_Versioned]) -> _Versioned | None:
    try:
        return record.parse_text(path.read_bytes(), source=str(path))
    except RecordError as error:
        files.skip(path, f"half-written or corrupted ({error.detail})")
    except OSError as error:
        files.skip(path, error.strerror or error)
    return None
