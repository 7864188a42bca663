"""The facts of a report as they stand in its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bract.defenses.words import words_of
from bract.report import facts
from bract.report.comparison import comparison
from bract.report.comparison.variants import Variant


def gather(root: Path) -> dict[str, Any]:
    return facts.gather(root).to_dict()


def gather_comparison(*args: Any, **options: Any) -> dict[str, Any]:
    return comparison.gather_comparison(*args, **options).to_dict()


def variant(name: str, *defenses: Mapping[str, Any], error: str | None = None) -> Variant:
    return Variant(name, defenses, words_of(defenses), error)
