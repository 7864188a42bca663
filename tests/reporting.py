"""The facts of a report as they stand in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bract.report import facts
from bract.report.comparison import comparison


def gather(root: Path) -> dict[str, Any]:
    return facts.gather(root).to_dict()


def gather_comparison(*args: Any, **options: Any) -> dict[str, Any]:
    return comparison.gather_comparison(*args, **options).to_dict()
