"""Signals over time as inline SVG: the original, and what was rebuilt, on one axis a channel."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

MOST_BYTES = 1 << 26
"""Largest file of a signal that is read."""

MOST_SHOWN = 12
"""Channels that are drawn; further ones are counted."""

MOST_POINTS = 1000
"""Points of a line; of longer signals the least and greatest value of each part are drawn."""

_WIDTH, _HEIGHT = 300, 110


@dataclass(frozen=True)
class Plot:
    """Drawn signals.

    Attributes
    ----------
    channels
        One picture a channel, the first ones.
    left
        Channels that are not drawn.
    axis
        What both axes show, in words.
    """

    channels: list[Markup]
    left: int
    axis: str


@dataclass(frozen=True)
class _Saved:
    values: list[list[float]]
    low: float
    high: float
    unit: str
    rate: float | None


def plot(
    root: Path, original: str | None, reconstruction: str | None, *, title: str, redact: bool
) -> Plot | None:
    """Draw a reconstruction above its original, over time; None redacted, or without a file.

    Parameters
    ----------
    root
        The run's folder, which the names are relative to; a name that leaves it is not read.
    title
        Read out in place of each picture.
    """
    if redact:
        return None
    found = [_read(root, name) for name in (original, reconstruction)]
    shown = found[1] or found[0]
    if shown is None:
        return None
    channels = []
    count = len(shown.values)
    for i in range(min(count, MOST_SHOWN)):
        each = [s.values[i] if s is not None and i < len(s.values) else None for s in found]
        which = f"{title}, channel {i + 1} of {count}" if count > 1 else title
        channels.append(_channel(each[0], each[1], shown, which))
    return Plot(channels, max(0, count - MOST_SHOWN), _axis(shown))


def _channel(
    original: list[float] | None, rebuilt: list[float] | None, about: _Saved, title: str
) -> Markup:
    known = [v for line in (original, rebuilt) if line is not None for v in line]
    low, high = min(known), max(known)
    spread = (high - low) or 1.0
    lines = [
        Markup('<polyline class="{0}" points="{1}"/>').format(css, _points(line, low, spread))
        for css, line in (("original", original), ("rebuilt", rebuilt))
        if line is not None
    ]
    unit = f" {about.unit}" if about.unit else ""
    labels = f"from {low:.3g}{unit} to {high:.3g}{unit}"
    return Markup(
        '<svg class="signal" viewBox="0 0 {0} {1}" preserveAspectRatio="none" role="img" '
        'aria-label="{2}, {3}"><title>{2}, {3}</title>{4}</svg>'
    ).format(_WIDTH, _HEIGHT, title, labels, Markup("").join(lines))


def _points(values: list[float], low: float, spread: float) -> str:
    last = max(1, len(values) - 1)
    return " ".join(
        f"{_WIDTH * at / last:.1f},{_HEIGHT - 3 - (_HEIGHT - 6) * (v - low) / spread:.1f}"
        for at, v in _thinned(values)
    )


def _thinned(values: list[float]) -> list[tuple[int, float]]:
    """Return at most `MOST_POINTS` values with their places, extremes of each part kept."""
    if len(values) <= MOST_POINTS:
        return list(enumerate(values))
    parts = MOST_POINTS // 2
    ends = [round(len(values) * i / parts) for i in range(parts + 1)]
    found: list[tuple[int, float]] = []
    for start, end in pairwise(ends):
        places = range(start, end)
        both = {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
        found += [(at, values[at]) for at in sorted(both)]
    return found


def _axis(saved: _Saved) -> str:
    count = len(saved.values[0])
    time = f"{count} values" if saved.rate is None else f"{_seconds(count / saved.rate)}"
    return f"{time} from left to right" + (f", in {saved.unit}" if saved.unit else "")


def _seconds(value: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def _read(root: Path, name: str | None) -> _Saved | None:
    """Return a saved signal of the run directory; None where it is not one."""
    if name is None:
        return None
    try:
        # The name comes from a file of the run directory, which may be another party's.
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()) or path.stat().st_size > MOST_BYTES:
            return None
        return _saved(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def _saved(content: Any) -> _Saved | None:
    values = [[float(v) for v in channel] for channel in content["values"]]
    low, high, rate = float(content["low"]), float(content["high"]), content["rate"]
    rate = None if rate is None else float(rate)
    numbers = [v for channel in values for v in channel] + [low, high]
    whole = bool(values) and all(len(channel) == len(values[0]) > 0 for channel in values)
    if not whole or not all(map(math.isfinite, numbers)) or not (rate is None or rate > 0.0):
        return None
    unit = content["unit"]
    return _Saved(values, low, high, unit[:32] if isinstance(unit, str) else "", rate)
