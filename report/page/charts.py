"""Charts as inline SVG: positions across in per cent, so that text keeps its size at any width.

Colours come from the style sheet by class, so charts follow light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from markupsafe import Markup

from bract.report.page.axis import Axis, dot, kept_apart, line
from bract.schema.report_rows import Spread

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
    rounds = Axis.counting(max(last_round, 1))
    values = Axis.even(low, high, percent=percent)
    parts = [values.rows(HEIGHT), rounds.columns(HEIGHT, lines=False)]
    if reference is not None:
        at = values.down(reference, HEIGHT)
        parts.append(line("0%", at, "100%", at, "reference"))
    parts += [_series(one, rounds, values) for one in series]
    parts.append(_end_labels(series, values, label_length))
    return Markup(
        '<svg class="plot" height="{0}" width="100%" role="img" aria-label="{1}">{2}</svg>'
    ).format(HEIGHT, title, Markup("").join(parts))


def _series(one: Series, rounds: Axis, values: Axis) -> Markup:
    points = [(rounds.across(at), values.down(value, HEIGHT)) for at, value in one.points]
    joined = [line(*a, *b, "joined") for a, b in pairwise(points)]
    if len(points) <= _MOST_POINTS:
        joined += [dot(at, height, 3, "point") for at, height in points]
    marks = [
        dot(
            rounds.across(at),
            values.down(value, HEIGHT),
            2.5,
            "mark filled" if filled else "mark",
        )
        for at, value, filled in one.marks
    ]
    for at, value in one.ticks:
        height = values.down(value, HEIGHT)
        marks.append(
            Markup('<svg x="{0}" overflow="visible">{1}</svg>').format(
                rounds.across(at), line("-4", height, "4", height, "baseline")
            )
        )
    return Markup(
        '<g class="{0}"><title>{1}</title>{2}<g transform="translate({3:.1f} 0)">{4}</g></g>'
    ).format(one.colour, one.name, Markup("").join(joined), one.shift, Markup("").join(marks))


def _end_labels(series: Sequence[Series], values: Axis, length: int) -> Markup:
    ends = sorted(
        (
            (values.down(one.points[-1][1], HEIGHT), one)
            for one in series
            if one.points and one.label
        ),
        key=lambda end: end[0],
    )
    places = kept_apart([height for height, _ in ends], _LABEL_GAP, bottom=HEIGHT - 4)
    return Markup("").join(
        Markup('<text class="{0} end" x="100%" y="{1:.1f}" dx="16" dy=".35em">{2}</text>').format(
            one.colour, place, _short(one.name, length)
        )
        for place, (_, one) in zip(places, ends, strict=True)
    )


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def score_bar(score: Spread, *, baseline: float | None, threshold: float, title: str) -> Markup:
    """Draw a mean on a scale from 0 to 1, with its interval, the threshold and the best
    baseline."""
    parts = [line("0%", 8, "100%", 8, "track")]
    parts.append(line(_across(threshold), 3, _across(threshold), 13, "reference"))
    if baseline is not None:
        parts.append(line(_across(baseline), 3, _across(baseline), 13, "baseline"))
    if score.low is not None and score.high is not None:
        parts.append(line(_across(score.low), 8, _across(score.high), 8, "interval"))
    if score.mean is not None:
        parts.append(dot(_across(score.mean), 8, 4, "point"))
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
