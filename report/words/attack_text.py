"""What one attack was and what it scored, in words: its tier and budget, its mean, its choice."""

from __future__ import annotations

from collections.abc import Sequence

from bract.report.order import strength
from bract.schema.report import AttackRow


def budget_text(row: AttackRow) -> str:
    """Return tier and budget in words: ``oblivious, 4,000 iterations, 2 restarts``."""
    parts = [str(row.tier)]
    if row.iterations:
        parts.append(f"{row.iterations:,} iterations")
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


def spread_text(row: AttackRow) -> str:
    """Return mean SSIM and its interval: ``mean SSIM 0.52, 95 % interval 0.41 to 0.63``."""
    ssim = row.ssim
    right = row.features
    if right.mean is not None:
        text = f"mean share of features right {right.mean:.2f}"
        if right.low is None or right.high is None:
            return text
        return f"{text}, 95 % interval {right.low:.2f} to {right.high:.2f}"
    if ssim.mean is None:
        return "no finite SSIM"
    text = f"mean SSIM {ssim.mean:.2f}"
    if ssim.low is None:
        if row.clients < 2:
            return f"{text}, no interval from 1 client"
        return f"{text}, no interval since all {row.clients} clients have the same mean"
    return f"{text}, 95 % interval {ssim.low:.2f} to {ssim.high:.2f}"


def choice_text(rows: Sequence[AttackRow]) -> str:
    """Note that the strongest of these attack rows was chosen with the originals; or nothing."""
    scored = [row for row in rows if row.scored]
    if len(scored) < 2:
        return ""
    text = f"; the strongest of {len(scored)} attackers, chosen with the originals"
    if max(scored, key=strength).ssim.low is not None:
        text += ", a choice that its interval does not cover"
    return text
