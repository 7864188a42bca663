"""Read values of a description from a witness's file, and compare its numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALIKE = 1e-6
"""Relative difference up to which two witnessed numbers are one."""


@dataclass
class Said:
    """Values of one file by their dotted key, and causes why no attack simulates all of it.

    ``notes`` says of a value what else than the training's own argument is in it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    unaudited: str | None = None


def number(value: object) -> float:
    """Return a number, and 0 for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else 0.0  # type: ignore[arg-type]


def plain(value: float) -> float:
    """Return a number as people write it, where that is nearly the same."""
    short = float(f"{value:.4g}")
    return short if abs(short - value) <= ALIKE * abs(value) else value


def same(one: Any, other: Any) -> bool:
    """Return whether two values are one, of numbers within `ALIKE`."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one == other)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= ALIKE * max(abs(one), abs(other))
    return bool(one == other)
