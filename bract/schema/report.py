"""``report.json``: the facts of one run, as `bract report` writes them and the page shows them.

A field is in a redacted report if it is marked as `Public` here, or in the record that a class
extends.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from bract.config import FederationConfig
from bract.config.audit import Tier
from bract.schema.account import ClaimRow, LeftFacts
from bract.schema.reach import ExamineFacts, ReachRow, RoundLeaks
from bract.schema.record import Number, Public, Record, VersionedRecord
from bract.schema.report_rows import (
    AttackRow,
    BoostingFacts,
    ClientFacts,
    LeakageRow,
    ObservationFacts,
    RoundFacts,
)
from bract.schema.verdict import ThreatModel, Verdict

REPORT_SCHEMA: Literal[5] = 5


class RunFacts(Record):
    """What ran, when and where; moments are ISO 8601 text.

    Of a third-party app only captures are there: its ``status`` is ``captured``, its rounds are
    those that were, and ``first_upload`` and ``last_upload`` are when the server received them.
    """

    name: Public[str]
    status: Public[str] = "unknown"
    model: Public[str | None] = None
    data: Public[str | None] = None
    inputs: Public[list[str]] = []
    rounds_done: Public[int] = 0
    rounds_planned: Public[int | None] = None
    started: Public[str | None] = None
    finished: Public[str | None] = None
    first_upload: Public[str | None] = None
    last_upload: Public[str | None] = None
    training_seconds: Public[Number] = None
    audit_seconds: Public[Number] = None
    device: Public[str | None] = None
    audit_devices: Public[list[str]] = []
    command: Public[str | None] = None
    flower_run_id: Public[str | None] = None
    versions: Public[dict[str, str]] = {}
    seed: Public[int | None] = None
    audit_seeds: Public[list[int]] = []


class RefusedFacts(Record):
    """An observation that was not attacked, and why."""

    attack_name: Public[str]
    tier: Public[Tier]
    round: Public[int]
    client: Public[str]
    refused: Public[str]


class FailureFacts(Record):
    """A client that did not answer in a round, and why."""

    round: Public[int]
    client: Public[str]
    reason: Public[str]


class SkippedFile(Record):
    """A file of the run directory that could not be used, and why."""

    file: Public[str]
    reason: Public[str]


class Table(Record):
    """Rows to be shown under names of columns."""

    columns: Public[list[str]] = []
    rows: Public[list[list[str | float | int | bool | None]]] = []


class QuestionFigure(Record):
    """One number of a question, of a client in a round."""

    name: Public[str]
    tier: Public[Tier]
    client: Public[str]
    round: Public[int]
    value: Public[Number] = None


class QuestionPart(Record):
    """One further section of a question: its heading, what it says, and a table."""

    title: Public[str]
    sentence: Public[str]
    table: Public[Table] = Table()


class QuestionFacts(Record):
    """What one question found, beside the reconstruction of inputs, which has its own tables.

    ``level`` is what the question's own rule decides, ``effort`` what an attacker needs for it, and
    ``missed`` how much could have been missed; both are empty where the rule does not know.
    ``unit`` is what one of its results is of. ``refused`` are reasons where it could not be asked,
    ``parts`` its further sections. A question whose answers hold more than the table shows has a
    fragment of the page of its own.
    """

    question: Public[str]
    title: Public[str]
    level: Public[str]
    sentence: Public[str]
    effort: Public[str] = ""
    missed: Public[str] = ""
    unit: Public[str] = ""
    refused: Public[list[str]] = []
    table: Public[Table] = Table()
    parts: Public[list[QuestionPart]] = []
    figures: Public[list[QuestionFigure]] = []

    @property
    def answered(self) -> bool:
        """Tell if the question found something out, beside one that could not be asked."""
        return self.level not in ("unknown", "failed")


class DependRow(Record):
    """One thing that the page rests on: another value of it makes the page stale.

    ``name`` stays the same over releases, ``title`` is what the page calls it. ``audited`` is what
    was audited, ``now`` what this installation has, None where that is no matter of it.
    """

    name: Public[str]
    title: Public[str]
    audited: Public[str] = ""
    now: Public[str | None] = None

    @property
    def stale(self) -> bool:
        """Tell if what was audited is no longer what is here."""
        return self.now is not None and self.audited != self.now


class ChangeRow(Record):
    """One thing before and after; ``changed``: whether the two differ."""

    title: Public[str]
    before: Public[str] = ""
    after: Public[str] = ""

    @property
    def changed(self) -> bool:
        """Tell if the two differ."""
        return self.before != self.after


class SinceFacts(Record):
    """An earlier page beside this one: what it rests on, and what the two conclude."""

    run: Public[str]
    written: Public[str]
    depends: Public[list[ChangeRow]] = []
    results: Public[list[ChangeRow]] = []


class Report(VersionedRecord):
    """The facts of one run.

    ``written`` is ISO 8601 text. ``worst`` is the position in ``observations`` of the one that
    leaked most. ``attacked`` counts the captured uploads that an attack ran on. Scores are those of
    the blind selection; ``oracle`` is beside them.
    """

    kind: ClassVar[str] = "report"
    remedy: ClassVar[str] = "write it again with `bract report`"

    schema_version: Public[Literal[5]] = Field(default=REPORT_SCHEMA, alias="schema")
    bract: Public[str]
    written: Public[str]
    redacted: Public[bool] = False
    run: Public[RunFacts]
    config: Public[FederationConfig | None] = None
    config_sha256: Public[str | None] = None
    verdict: Public[Verdict]
    worst: Public[int | None] = None
    rounds: Public[list[RoundFacts]] = []
    boosting: Public[list[BoostingFacts]] = []
    leakage: Public[list[LeakageRow]] = []
    clients: Public[list[ClientFacts]] = []
    attacks: Public[list[AttackRow]] = []
    observations: Public[list[ObservationFacts]] = []
    captures: Public[int] = 0
    attacked: Public[int] = 0
    reach: Public[list[ReachRow]] = []
    by_round: Public[list[RoundLeaks]] = []
    examine: Public[ExamineFacts] = ExamineFacts()
    refused: Public[list[RefusedFacts]] = []
    failures: Public[list[FailureFacts]] = []
    skipped: Public[list[SkippedFile]] = []
    notes: Public[list[str]] = []
    questions: Public[list[QuestionFacts]] = []
    left: Public[LeftFacts] = LeftFacts()
    claims: Public[list[ClaimRow]] = []
    depends: Public[list[DependRow]] = []
    since: Public[SinceFacts | None] = None
    threat_model: Public[ThreatModel]

    @field_validator("reach", mode="before")
    @classmethod
    def _rows_of_0_6_0(cls, rows: Any) -> Any:
        """Leave out the row of the best guess, which each row has beside it since."""
        if not isinstance(rows, list):
            return rows
        return [r for r in rows if not (isinstance(r, dict) and r.get("scope") == "without")]

    def redact(self) -> Self:
        """Return a copy without what shows or describes a single person's image."""
        return super().redact().model_copy(update={"redacted": True})
