"""Accuracy against leakage, every variant in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bract.report.page.axis import Axis, kept_apart, line

HEIGHT = 330
_LABEL_GAP = 17
_THIN = 4.0

LEAKAGE = Axis.even(0.0, 1.0)
"""The axis of SSIM, upwards."""


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
    accuracy = accuracy_axis(points)
    parts = []
    if band is not None:
        top, bottom = _y(band[1]), _y(band[0])
        parts.append(
            Markup('<rect class="band" x="0%" y="{0:.1f}" width="100%" height="{1:.1f}"/>').format(
                min(top, HEIGHT - _THIN), max(bottom - top, _THIN)
            )
        )
    parts += [LEAKAGE.rows(HEIGHT), accuracy.columns(HEIGHT, lines=True)]
    parts.append(line("0%", _y(threshold), "100%", _y(threshold), "reference"))
    parts.append(_labels([p for p in points if p.label], accuracy))
    parts += [_point(p, accuracy) for p in points]
    return Markup(
        '<svg class="plot scatter" height="{0}" width="100%" role="img" aria-label="{1}">{2}</svg>'
    ).format(HEIGHT, title, Markup("").join(parts))


def accuracy_axis(points: Sequence[Point]) -> Axis:
    """Return the accuracy axis: round numbers around every interval."""
    values = [v for p in points for v in (p.x, *(p.x_span or ()))]
    return Axis.around(values, most=5, least=0.005, percent=True)


def _y(value: float) -> float:
    return LEAKAGE.down(value, HEIGHT)


def _labels(points: Sequence[Point], accuracy: Axis) -> Markup:
    """Write names at the right edge, apart from each other, each joined to its point by a line."""
    ordered = sorted(points, key=lambda p: _y(p.y))
    places = kept_apart([_y(p.y) for p in ordered], _LABEL_GAP, top=6.0, bottom=HEIGHT - 6)
    return Markup("").join(
        Markup(
            '<g class="{0}">{1}<svg x="100%" overflow="visible">{2}'
            '<text class="end" x="16" y="{3:.1f}" dy=".35em">{4}</text></svg></g>'
        ).format(
            point.colour,
            line(accuracy.across(point.x), _y(point.y), "100%", _y(point.y), "leader"),
            line("0", _y(point.y), "12", place, "leader"),
            place,
            point.label,
        )
        for point, place in zip(ordered, places, strict=True)
    )


def _point(point: Point, accuracy: Axis) -> Markup:
    parts = []
    if point.x_span is not None:
        left, right = (accuracy.across(end) for end in point.x_span)
        parts.append(line(left, _y(point.y), right, _y(point.y), "interval"))
    marks = []
    if point.y_span is not None:
        marks.append(line("0", _y(point.y_span[0]), "0", _y(point.y_span[1]), "interval"))
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
        Markup('<svg x="{0}" overflow="visible">{1}</svg>').format(
            accuracy.across(point.x), Markup("").join(marks)
        )
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
