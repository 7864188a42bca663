"""What bract writes to disk, as records: one class for the writer and the reader of each file.

Importing this package loads neither torch nor Flower. `bract.cli.schemas` publishes the records as
JSON Schema.
"""

from bract.schema.audit import Answer, AuditResult
from bract.schema.capture import ObservationFile
from bract.schema.claims import ProtectionClaim
from bract.schema.declaration import ClientDeclaration
from bract.schema.description import AppDescription
from bract.schema.left import LeftReply, LeftThing
from bract.schema.record import Number, Public, Record, VersionedRecord
from bract.schema.report import Report
from bract.schema.work import Work, read_work

__all__ = [
    "Answer",
    "AppDescription",
    "AuditResult",
    "ClientDeclaration",
    "LeftReply",
    "LeftThing",
    "Number",
    "ObservationFile",
    "ProtectionClaim",
    "Public",
    "Record",
    "Report",
    "VersionedRecord",
    "Work",
    "read_work",
]
