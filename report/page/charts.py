"""Charts as inline SVG: positions across in per cent, so that text keeps its size at any width.

Colours come from the style sheet by class, so charts follow light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from bract.schema.report import Spread

HEIGHT = 190
COLOURS = 6
_LABEL_GAP = 15
_MOST_POINTS = 12


@dataclass
class Series:
    """One line of a chart.

    Attributes
    ----------
    points
        Joined by a line, ``(x, y)``.
    marks
        Single values, ``(x, y, filled)``, drawn as small circles ``shift`` pixels to the side.
    ticks
        Values to compare with, ``(x, y)``, drawn as short strokes above or below the marks.
    colour
        A class of the style sheet: ``c0`` to ``c5``, ``rest`` or ``total``.
    """

    name: str
    colour: str
    points: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, float, bool]] = field(default_factory=list)
    ticks: list[tuple[float, float]] = field(default_factory=list)
    shift: float = 0.0
    label: bool = True


def colours(clients: Sequence[str]) -> dict[str, str]:
    """Give each of the first `COLOURS` clients a colour class, and ``rest`` to the others."""
    return {name: f"c{i}" if i < COLOURS else "rest" for i, name in enumerate(clients)}


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    last_round: int,
    percent: bool = False,
    low: float = 0.0,
    high: float = 1.0,
    reference: float | None = None,
    label_length: int = 12,
) -> Markup:
    """Draw values by round, the vertical axis from ``low`` to ``high``.

    Parameters
    ----------
    title
        Read out in place of the picture.
    reference
        A dashed line across, at this value.
    label_length
        Characters of a name that the right margin has room for.
    """
    last_round = max(last_round, 1)

    def x(value: float) -> str:
        return f"{100 * value / last_round:.2f}%"

    def y(value: float) -> float:
        return HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))

    parts = [_grid(low, high, percent, y), _rounds(last_round, x)]
    if reference is not None:
        parts.append(_line("0%", y(reference), "100%", y(reference), "reference"))
    for line in series:
        parts.append(_series(line, x, y))
    parts.append(_end_labels(series, y, label_length))
    return Markup(
        '<svg class="plot" height="{0}" width="100%" role="img" aria-label="{1}">{2}</svg>'
    ).format(HEIGHT, title, Markup("").join(parts))


def _grid(low: float, high: float, percent: bool, y: Any) -> Markup:
    lines = []
    for step in range(5):
        value = low + (high - low) * step / 4
        text = f"{100 * value:.0f}%" if percent else f"{value:.2f}".rstrip("0").rstrip(".")
        lines.append(_line("0%", y(value), "100%", y(value), "base" if step == 0 else "grid"))
        lines.append(
            Markup('<text x="-8" y="{0:.1f}" dy=".35em" text-anchor="end">{1}</text>').format(
                y(value), text or "0"
            )
        )
    return Markup("").join(lines)


def _rounds(last_round: int, x: Any) -> Markup:
    step = max(1, math.ceil(last_round / 8))
    shown = [*range(0, last_round, step), last_round]
    if len(shown) > 2 and shown[-1] - shown[-2] < step:
        del shown[-2]
    return Markup("").join(
        Markup('<text x="{0}" y="{1}" text-anchor="middle">{2}</text>').format(
            x(value), HEIGHT + 18, value
        )
        for value in shown
    )


def _series(line: Series, x: Any, y: Any) -> Markup:
    joined = [
        _line(x(a[0]), y(a[1]), x(b[0]), y(b[1]), "joined")
        for a, b in zip(line.points, line.points[1:], strict=False)
    ]
    if len(line.points) <= _MOST_POINTS:
        joined += [_dot(x(at), y(value), 3, "point") for at, value in line.points]
    marks = [
        _dot(x(at), y(value), 2.5, "mark filled" if filled else "mark")
        for at, value, filled in line.marks
    ]
    marks += [
        Markup('<svg x="{0}" overflow="visible">{1}</svg>').format(
            x(at), _line("-4", y(value), "4", y(value), "baseline")
        )
        for at, value in line.ticks
    ]
    return Markup(
        '<g class="{0}"><title>{1}</title>{2}<g transform="translate({3:.1f} 0)">{4}</g></g>'
    ).format(line.colour, line.name, Markup("").join(joined), line.shift, Markup("").join(marks))


def _end_labels(series: Sequence[Series], y: Any, length: int) -> Markup:
    ends = sorted(
        ((y(line.points[-1][1]), line) for line in series if line.points and line.label),
        key=lambda end: end[0],
    )
    places: list[float] = []
    for height, _ in ends:
        places.append(max(height, places[-1] + _LABEL_GAP) if places else height)
    if places and places[-1] > HEIGHT - 4:
        places[-1] = HEIGHT - 4
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - _LABEL_GAP)
    return Markup("").join(
        Markup('<text class="{0} end" x="100%" y="{1:.1f}" dx="16" dy=".35em">{2}</text>').format(
            line.colour, place, _short(line.name, length)
        )
        for place, (_, line) in zip(places, ends, strict=True)
    )


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def score_bar(score: Spread, *, baseline: float | None, threshold: float, title: str) -> Markup:
    """Draw a mean on a scale from 0 to 1, with its interval, the threshold and the best
    baseline."""
    parts = [_line("0%", 8, "100%", 8, "track")]
    parts.append(_line(_across(threshold), 3, _across(threshold), 13, "reference"))
    if baseline is not None:
        parts.append(_line(_across(baseline), 3, _across(baseline), 13, "baseline"))
    if score.low is not None and score.high is not None:
        parts.append(_line(_across(score.low), 8, _across(score.high), 8, "interval"))
    if score.mean is not None:
        parts.append(_dot(_across(score.mean), 8, 4, "point"))
    return Markup(
        '<svg class="bar" height="16" width="100%" role="img" aria-label="{0}">{1}</svg>'
    ).format(title, Markup("").join(parts))


def loss_curve(curve: Sequence[Sequence[float | None]]) -> Markup | None:
    """Draw an attack's loss over its iterations, on a logarithmic scale where all are positive."""
    points = [(x, y) for x, y in curve if x is not None and y is not None]
    if len(points) < 2:
        return None
    title = f"attack loss from {points[0][1]:.3g} to {points[-1][1]:.3g}"
    if min(y for _, y in points) > 0:
        points = [(x, math.log10(y)) for x, y in points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    width, height = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    path = " ".join(
        f"{100 * (x - min(xs)) / width:.1f},{22 - 20 * (y - min(ys)) / height:.1f}"
        for x, y in points
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" '
        'aria-label="{0}"><polyline points="{1}"/></svg>'
    ).format(title, path)


def _across(value: float) -> str:
    return f"{100 * min(max(value, 0.0), 1.0):.1f}%"


def _line(x1: str, y1: float, x2: str, y2: float, css: str) -> Markup:
    return Markup('<line class="{4}" x1="{0}" y1="{1:.1f}" x2="{2}" y2="{3:.1f}"/>').format(
        x1, y1, x2, y2, css
    )


def _dot(x: str, y: float, radius: float, css: str) -> Markup:
    return Markup('<circle class="{3}" cx="{0}" cy="{1:.1f}" r="{2}"/>').format(x, y, radius, css)
