"""Files that bract reads and writes, as JSON Schema: ``python -m bract.cli.schemas docs/schema``.

``federation.json``, ``policy.json`` and ``bract.json`` let an editor complete and check the YAML
files; the others describe the files of a run directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from bract.client.policy import SitePolicy
from bract.config import FederationConfig
from bract.files import write_text
from bract.schema import AuditResult, ObservationFile, Report
from bract.schema.comparison import Comparison
from bract.schema.description import AppDescription
from bract.schema.epsilon import EpsilonAnswer
from bract.schema.hardening import Hardening
from bract.schema.live import LiveAudit
from bract.schema.membership import MembershipAnswer
from bract.schema.metrics import MetricsRow
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
    "harden": Hardening,
    "work": Work,
}
"""Files that bract writes; ``metrics`` is one line of ``metrics.jsonl``."""


def json_schema(name: str) -> str:
    """Return the JSON Schema of one kind of file, as text."""
    if name in READ:
        content = READ[name].model_json_schema(mode="validation")
    else:
        content = WRITTEN[name].model_json_schema(mode="serialization")
    return json.dumps({"$schema": DIALECT, **content}, indent=1, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> list[Path]:
    """Write every schema as ``folder/NAME.json``."""
    return [write_text(folder / f"{name}.json", json_schema(name)) for name in (*READ, *WRITTEN)]


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
