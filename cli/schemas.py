"""Files that bract reads and writes, as JSON Schema: ``python -m bract.cli.schemas docs/schema``.

``federation.json``, ``policy.json`` and ``bract.json`` let an editor complete and check the YAML
files; the others describe the files of a run directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bract.client.policy import SitePolicy
from bract.config import FederationConfig
from bract.disk.files import write_text
from bract.schema import AuditResult, ObservationFile, Report
from bract.schema.comparison import Comparison
from bract.schema.description import AppDescription
from bract.schema.epsilon import EpsilonAnswer
from bract.schema.live import LiveAudit
from bract.schema.membership import MembershipAnswer
from bract.schema.metrics import MetricsRow
from bract.schema.release import ReleaseSheet
from bract.schema.run import RunState
from bract.schema.work import Work

DIALECT = "https://json-schema.org/draft/2020-12/schema"

READ: dict[str, type[BaseModel]] = {
    "federation": FederationConfig,
    "policy": SitePolicy,
    "bract": AppDescription,
}
"""Files that people write."""

WRITTEN: dict[str, type[BaseModel]] = {
    "run": RunState,
    "metrics": MetricsRow,
    "observation": ObservationFile,
    "audit": AuditResult,
    "membership": MembershipAnswer,
    "epsilon": EpsilonAnswer,
    "live": LiveAudit,
    "report": Report,
    "comparison": Comparison,
    "release": ReleaseSheet,
    "work": Work,
}
"""Files that bract writes; ``metrics`` is one line of ``metrics.jsonl``.

Packages of ``plugins/`` write the schemas of their own: ``python -m bract_harden``.
"""


def json_schema(name: str) -> str:
    """Return the JSON Schema of one kind of file, as text."""
    if name in WRITTEN:
        return schema_of(WRITTEN[name])
    return _text(READ[name].model_json_schema(mode="validation"))


def schema_of(record: type[BaseModel]) -> str:
    """Return the JSON Schema of files that hold a record, as text."""
    return _text(record.model_json_schema(mode="serialization"))


def _text(schema: dict[str, Any]) -> str:
    return json.dumps({"$schema": DIALECT, **schema}, indent=1, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> list[Path]:
    """Write every schema as ``folder/NAME.json``."""
    return [write_text(folder / f"{name}.json", json_schema(name)) for name in (*READ, *WRITTEN)]


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
