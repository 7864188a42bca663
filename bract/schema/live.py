"""``live.json``: the state of the audit that runs during the training."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bract.schema.record import Number, VersionedRecord

LIVE_SCHEMA: Literal[1] = 1

LiveStatus = Literal["waiting", "attacking", "ended", "failed"]


class LiveAudit(VersionedRecord):
    """The state of the live audit.

    ``queue`` counts the uploads that wait, the one that is attacked now, ``current``, not among
    them; ``skipped`` those that were dropped from a full queue, which ``bract audit --resume``
    attacks later. ``failed`` counts uploads on which the attack itself failed, ``error`` is the
    last reason. ``fraction`` of the current attack is done. ``updated`` is in seconds since the
    epoch.
    """

    kind: ClassVar[str] = "live audit"
    remedy: ClassVar[str] = "use the bract version that wrote it"

    schema_version: Literal[1] = Field(default=LIVE_SCHEMA, alias="schema")
    status: LiveStatus = "waiting"
    pid: int
    attacks: list[str]
    every: int
    done: int = 0
    queue: int = 0
    skipped: int = 0
    failed: int = 0
    current: str | None = None
    fraction: Number = None
    error: str | None = None
    updated: float
