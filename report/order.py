"""The orders of the report: names as people read them, and the strength of attacks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bract.schema.report_rows import AttackRow, ObservationFacts

Strength = tuple[float, float, float]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which ``client-2`` comes before ``client-10``."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def strength(row: AttackRow) -> Strength:
    """Order attack rows by the share of examples leaked, then the primary score, PSNR."""
    return _strength(row.leaked, row.scored, row.primary.mean, row.psnr.mean)


def severity(observation: ObservationFacts) -> Strength:
    """Order observations by the share of examples leaked, then the primary score, PSNR."""
    near, psnr = mean(scores(observation, "primary")), mean(scores(observation, "psnr"))
    return _strength(observation.leaked, observation.scored, near, psnr)


def match(row: AttackRow | ObservationFacts) -> float:
    """Order rows by the match of the gradient, the attacker's own measure."""
    return -2.0 if row.gradient_cosine is None else row.gradient_cosine


def scores(observation: ObservationFacts, name: str) -> list[float]:
    """Return one score of each image that has it."""
    found = [getattr(image.scores, name) for image in observation.images if image.scores]
    return [value for value in found if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def last(values: Iterable[float | None]) -> float | None:
    """Return the last known value; None where nothing is."""
    return next((v for v in reversed(list(values)) if v is not None), None)


def _strength(leaked: int, scored: int, near: float | None, psnr: float | None) -> Strength:
    share = leaked / scored if scored else -1.0
    return share, -2.0 if near is None else near, -1.0 if psnr is None else psnr
