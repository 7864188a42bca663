"""What one attack was and what it scored, in words: its tier and budget, its mean, its choice."""

from __future__ import annotations

from collections.abc import Sequence

from bract.report.order import strength
from bract.report.words.formatting import plural
from bract.schema.report_rows import AttackRow

HURRIED = 1.0
"""Seconds for one upload below which a verdict begins with them."""


def budget_text(row: AttackRow) -> str:
    """Return tier and budget in words: ``oblivious, 4,000 iterations, 2 restarts``."""
    parts = [str(row.tier)]
    if row.iterations:
        parts.append(plural(row.iterations, "iteration"))
    if row.budget_seconds:
        parts.append(f"{row.budget_seconds:g} s an upload")
    if row.restarts and row.restarts > 1:
        parts.append(f"{row.restarts} restarts")
    if row.repeats > 1:
        parts.append(f"{row.repeats} seeds")
    if row.methods:
        names = sorted(row.methods, key=lambda name: (-row.methods[name], name))
        if row.chose:
            parts.append(f"settling blind on {' or '.join(names)}")
        else:
            parts.append(f"run as {' and '.join(names)}")
    return ", ".join(parts)


def hurried(row: AttackRow) -> str:
    """Return words to begin a verdict with, over uploads that got under a second; else nothing."""
    seconds = row.budget_seconds
    if seconds is None or seconds >= HURRIED:
        return ""
    return f"with at most {seconds:.2g} s for each upload, "


def spread_text(row: AttackRow) -> str:
    """Return the mean score: ``mean SSIM 0.52, 95 % interval 0.41 to 0.63``."""
    found = row.primary
    if found.mean is None:
        return f"no finite {row.measure}"
    text = f"mean {row.measure} {found.mean:.2f}"
    if found.low is None or found.high is None:
        if row.clients < 2:
            return f"{text}, no interval from 1 client"
        every = "both" if row.clients == 2 else f"all {row.clients}"
        return f"{text}, no interval since {every} clients have the same mean"
    few = "of 2 clients alone " if row.clients == 2 else ""
    return f"{text}, 95 % interval {few}{found.low:.2f} to {found.high:.2f}"


def choice_text(rows: Sequence[AttackRow]) -> str:
    """Note that the strongest of these attack rows was chosen with the originals; or nothing."""
    scored = [row for row in rows if row.scored]
    if len(scored) < 2:
        return ""
    text = f"; the worst of {len(scored)} attackers, a choice by the originals that no attacker has"
    if max(scored, key=strength).primary.low is not None:
        text += "; the interval makes no allowance for that choice"
    return text
