"""Accuracy against leakage, every variant in one picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

HEIGHT = 330
_LABEL_GAP = 17
_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_MOST_STEPS = 5
_THIN = 4.0

Place = Callable[[float], str]


@dataclass(frozen=True)
class Point:
    """One variant under one tier.

    Attributes
    ----------
    x, x_span
        Accuracy in [0, 1], and its interval.
    y, y_span
        Mean SSIM, and its interval.
    best
        SSIM of the best reconstruction.
    tier
        ``oblivious``, ``adaptive``, ``surrogate`` or ``colluding``: the shape of the mark.
    label
        Written at the right edge; None for a variant's further points.
    """

    name: str
    colour: str
    x: float
    y: float
    x_span: tuple[float, float] | None = None
    y_span: tuple[float, float] | None = None
    best: float | None = None
    tier: str = "oblivious"
    label: str | None = None


def scatter(
    points: Sequence[Point], *, title: str, threshold: float, band: tuple[float, float] | None
) -> Markup:
    """Draw leakage (0 to 1, upwards) by accuracy (to the right).

    Parameters
    ----------
    title
        Read out in place of the picture.
    threshold
        A dashed line: from this SSIM on an image can count as leaked.
    band
        Lowest and highest SSIM of the baselines without the gradient.
    """
    low, high, step = accuracy_axis(points)

    def x(value: float) -> str:
        return f"{100 * (min(max(value, low), high) - low) / (high - low):.2f}%"

    parts = []
    if band is not None:
        top, bottom = _y(band[1]), _y(band[0])
        parts.append(
            Markup('<rect class="band" x="0%" y="{0:.1f}" width="100%" height="{1:.1f}"/>').format(
                min(top, HEIGHT - _THIN), max(bottom - top, _THIN)
            )
        )
    parts += [_values(), _accuracies(low, high, step, x)]
    parts.append(
        Markup('<line class="reference" x1="0%" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>').format(
            _y(threshold)
        )
    )
    parts.append(_labels([p for p in points if p.label], x))
    parts += [_point(p, x(p.x), x) for p in points]
    return Markup(
        '<svg class="plot scatter" height="{0}" width="100%" role="img" aria-label="{1}">{2}</svg>'
    ).format(HEIGHT, title, Markup("").join(parts))


def accuracy_axis(points: Sequence[Point]) -> tuple[float, float, float]:
    """Return start, end and step of the accuracy axis: round numbers around every interval."""
    values = [v for p in points for v in (p.x, *(p.x_span or ()))] or [0.0, 1.0]
    low, high = min(values), max(values)
    step = next((s for s in _STEPS if (high - low) / s <= _MOST_STEPS), _STEPS[-1])
    start = max(math.floor(round(low / step, 6)) * step, 0.0)
    end = min(math.ceil(round(high / step, 6)) * step, 1.0)
    if end - start < step:
        start, end = (start, start + step) if start + step <= 1.0 else (end - step, end)
    return start, end, step


def _y(value: float) -> float:
    return HEIGHT * (1 - min(max(value, 0.0), 1.0))


def _values() -> Markup:
    lines = []
    for i in range(5):
        lines.append(
            Markup(
                '<line class="{0}" x1="0%" x2="100%" y1="{1:.1f}" y2="{1:.1f}"/>'
                '<text x="-8" y="{1:.1f}" dy=".35em" text-anchor="end">{2:g}</text>'
            ).format("base" if i == 0 else "grid", _y(i / 4), i / 4)
        )
    return Markup("").join(lines)


def _accuracies(low: float, high: float, step: float, x: Place) -> Markup:
    digits = 1 if step < 0.01 else 0
    count = round((high - low) / step)
    return Markup("").join(
        Markup(
            '<line class="grid" x1="{0}" x2="{0}" y1="0" y2="{1}"/>'
            '<text x="{0}" y="{2}" text-anchor="middle">{3}%</text>'
        ).format(x(low + i * step), HEIGHT, HEIGHT + 18, f"{100 * (low + i * step):.{digits}f}")
        for i in range(count + 1)
    )


def _labels(points: Sequence[Point], x: Place) -> Markup:
    """Write names at the right edge, apart from each other, each joined to its point by a line."""
    ordered = sorted(points, key=lambda p: _y(p.y))
    places: list[float] = []
    for point in ordered:
        height = _y(point.y)
        places.append(max(height, places[-1] + _LABEL_GAP) if places else max(height, 6.0))
    if places and places[-1] > HEIGHT - 6:
        places[-1] = HEIGHT - 6
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - _LABEL_GAP)
    return Markup("").join(
        Markup(
            '<g class="{0}"><line class="leader" x1="{1}" x2="100%" y1="{2:.1f}" y2="{2:.1f}"/>'
            '<svg x="100%" overflow="visible"><line class="leader" x1="0" y1="{2:.1f}" x2="12" '
            'y2="{3:.1f}"/><text class="end" x="16" y="{3:.1f}" dy=".35em">{4}</text></svg></g>'
        ).format(point.colour, x(point.x), _y(point.y), place, point.label)
        for point, place in zip(ordered, places, strict=True)
    )


def _point(point: Point, at: str, x: Place) -> Markup:
    parts = []
    if point.x_span is not None:
        parts.append(
            Markup('<line class="interval" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>').format(
                x(point.x_span[0]), x(point.x_span[1]), _y(point.y)
            )
        )
    marks = []
    if point.y_span is not None:
        marks.append(
            Markup('<line class="interval" x1="0" x2="0" y1="{0:.1f}" y2="{1:.1f}"/>').format(
                _y(point.y_span[0]), _y(point.y_span[1])
            )
        )
    if point.best is not None:
        marks.append(
            Markup('<circle class="best" cx="0" cy="{0:.1f}" r="3"/>').format(_y(point.best))
        )
    marks.append(
        Markup('<path class="point" transform="translate(0 {0:.1f})" d="{1}"/>').format(
            _y(point.y), SHAPES[point.tier]
        )
    )
    parts.append(
        Markup('<svg x="{0}" overflow="visible">{1}</svg>').format(at, Markup("").join(marks))
    )
    return Markup('<g class="{0}"><title>{1}</title>{2}</g>').format(
        point.colour, point.name, Markup("").join(parts)
    )


SHAPES = {
    "oblivious": "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z",
    "adaptive": "M0 -7.5L7.5 0L0 7.5L-7.5 0z",
    "surrogate": "M-5.5 -5.5L5.5 -5.5L5.5 5.5L-5.5 5.5z",
    "colluding": "M0 -7.5L7 5.5L-7 5.5z",
}
"""A disc, a diamond, a square and a triangle around the origin."""
