"""``release.json``: by which limits a run was judged, and what may go out."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bract.schema.reach import ExamineFacts, ReachRow
from bract.schema.record import Public, Record, VersionedRecord
from bract.schema.report import DependRow


class LimitRow(Record):
    """One limit, as ``--fail-on`` has it: what is above it does not pass, nor what is unknown.

    ``tier`` is the one that it is about, None for every one; ``meaning`` says the limit in words.
    """

    limit: Public[str]
    meaning: Public[str] = ""
    tier: Public[str | None] = None
    passed: Public[bool]
    found: Public[str]


class TierRow(Record):
    """One tier of attackers: whether it was tried, and whether it held every limit about it.

    ``limited``: whether any limit is about it; without one it has not passed.
    """

    tier: Public[str]
    tried: Public[bool]
    needed: Public[bool]
    limited: Public[bool] = True
    passed: Public[bool]
    sentence: Public[str]


class AskedRow(Record):
    """Findings of one question, and how much it could have missed."""

    title: Public[str]
    level: Public[str]
    sentence: Public[str]
    missed: Public[str] = ""


class FileRow(Record):
    """A file that goes out, by its name alone, and its SHA-256."""

    name: Public[str]
    size: Public[int]
    sha256: Public[str]


class ReleaseSheet(VersionedRecord):
    """The record of a run when its model is given away.

    ``passed``: every limit held, every tier that has anything to know was tried, nothing leaked in
    a tier without a limit, the final model itself was asked about, the day of the next examination
    has not passed, and nothing that the page rests on has changed since. ``open_points`` says what
    is in the way. The sheet decides nothing: a person signs it. ``final_examined`` says whether the
    final model itself was asked about, beside the uploads that made it. ``reach`` and ``examine``
    are the report's, ``changes`` what mitigates.
    """

    kind: ClassVar[str] = "release"
    remedy: ClassVar[str] = "write it again with `bract release`"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    bract: Public[str]
    written: Public[str]
    run: Public[str]
    passed: Public[bool]
    open_points: Public[list[str]] = []
    finding: Public[str]
    limits: Public[list[LimitRow]] = []
    tiers: Public[list[TierRow]] = []
    questions: Public[list[AskedRow]] = []
    files: Public[list[FileRow]] = []
    final_examined: Public[bool] = False
    reach: Public[list[ReachRow]] = []
    examine: Public[ExamineFacts] = ExamineFacts()
    not_covered: Public[list[str]] = []
    changes: Public[list[str]] = []
    depends: Public[list[DependRow]] = []
