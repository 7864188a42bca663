"""``run.json``: what ran, when, with which versions, and its state."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bract.schema.metrics import MetricsRow
from bract.schema.record import VersionedRecord

RUN_SCHEMA: Literal[2] = 2

Status = Literal["unknown", "starting", "running", "finished", "failed", "interrupted", "stopped"]


class RunState(VersionedRecord):
    """The state of one run.

    ``started`` and ``finished`` are seconds since the epoch. ``versions`` are those of bract, of
    Python and of the packages that a result depends on, by name. ``pending_row`` is the row of an
    encrypted run's last round, which waits for the clients' judgement of its model. ``waiting``
    names the clients that the server waits for, None while it waits for none. A run is ``stopped``
    by `bract stop`, and ``interrupted`` by a signal or a crash.
    """

    kind: ClassVar[str] = "run"
    remedy: ClassVar[str] = "use the bract version that made it, or run it again"

    schema_version: Literal[2] = Field(default=RUN_SCHEMA, alias="schema")
    name: str | None = None
    status: Status = "unknown"
    started: float | None = None
    finished: float | None = None
    device: str | None = None
    command: str | None = None
    flower_run_id: str | None = None
    versions: dict[str, str] = {}
    error: str | None = None
    pending_row: MetricsRow | None = None
    waiting: str | None = None
