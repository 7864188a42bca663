"""Write the JSON Schema of ``harden.json``: ``python -m bract_harden docs/schema``."""

from __future__ import annotations

import sys
from pathlib import Path

from bract.cli.schemas import schema_of
from bract.disk import write_text
from bract_harden.records import Hardening

if __name__ == "__main__":
    write_text(Path(sys.argv[1]) / "harden.json", schema_of(Hardening))
