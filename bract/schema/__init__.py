"""What bract writes to disk, as records: one class for the writer and the reader of each file.

Importing this package loads neither torch nor Flower. `bract.cli.schemas` publishes the records as
JSON Schema.
"""

from bract.config.audit import TIERS, Tier
from bract.schema.audit import (
    AUDIT_SCHEMA,
    EXACT_DB,
    Answer,
    AttackRecord,
    AuditBudget,
    AuditResult,
    Baseline,
    ImageCounts,
    ImageResult,
    InformationBound,
    LayerMatch,
    Retrieval,
    ScoreRecord,
    Scores,
    Signals,
    StepCounts,
    TrialSummary,
    TruthCheck,
)
from bract.schema.capture import (
    OBSERVATION_SCHEMA,
    ClientDeclaration,
    ClientStatement,
    MissedCapture,
    ObservationFile,
    Provenance,
    RemovedRound,
    Rounding,
)
from bract.schema.comparison import COMPARISON_SCHEMA, Comparison
from bract.schema.description import AppDescription
from bract.schema.live import LIVE_SCHEMA, LiveAudit
from bract.schema.metrics import (
    BoostingRow,
    ClientRow,
    FailureRow,
    GlobalRow,
    MetricsRow,
)
from bract.schema.prior import PRIOR_SCHEMA, PriorFacts
from bract.schema.record import Number, Public, Record, RecordError, VersionedRecord
from bract.schema.report import REPORT_SCHEMA, Report
from bract.schema.run import RUN_SCHEMA, RunState, Status

__all__ = [
    "AUDIT_SCHEMA",
    "COMPARISON_SCHEMA",
    "EXACT_DB",
    "LIVE_SCHEMA",
    "OBSERVATION_SCHEMA",
    "PRIOR_SCHEMA",
    "REPORT_SCHEMA",
    "RUN_SCHEMA",
    "TIERS",
    "Answer",
    "AppDescription",
    "AttackRecord",
    "AuditBudget",
    "AuditResult",
    "Baseline",
    "BoostingRow",
    "ClientDeclaration",
    "ClientRow",
    "ClientStatement",
    "Comparison",
    "FailureRow",
    "GlobalRow",
    "ImageCounts",
    "ImageResult",
    "InformationBound",
    "LayerMatch",
    "LiveAudit",
    "MetricsRow",
    "MissedCapture",
    "Number",
    "ObservationFile",
    "PriorFacts",
    "Provenance",
    "Public",
    "Record",
    "RecordError",
    "RemovedRound",
    "Report",
    "Retrieval",
    "Rounding",
    "RunState",
    "ScoreRecord",
    "Scores",
    "Signals",
    "Status",
    "StepCounts",
    "Tier",
    "TrialSummary",
    "TruthCheck",
    "VersionedRecord",
]
