"""Axes of charts: round ticks, and places in inline SVG.

Places across are in per cent, so that text keeps its size at any width; places down are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes
    ----------
    ticks
        Values that are labelled, ascending; the first and the last end the axis.
    labels
        Their texts.
    """

    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    @classmethod
    def even(cls, low: float, high: float, *, steps: int = 4, percent: bool = False) -> Axis:
        """Return an axis of equal steps from ``low`` to ``high``."""
        ticks = tuple(low + (high - low) * i / steps for i in range(steps + 1))
        if percent:
            return cls(ticks, tuple(f"{100 * tick:.0f}%" for tick in ticks))
        return cls(ticks, tuple(f"{tick:.2f}".rstrip("0").rstrip(".") for tick in ticks))

    @classmethod
    def counting(cls, last: int) -> Axis:
        """Return an axis from 0 to ``last``, with whole numbers at about eight ticks."""
        step = max(1, math.ceil(last / 8))
        shown = [*range(0, last, step), last]
        if len(shown) > 2 and shown[-1] - shown[-2] < step:
            del shown[-2]
        return cls(tuple(map(float, shown)), tuple(map(str, shown)))

    @classmethod
    def around(
        cls, values: Sequence[float], *, most: int, least: float, percent: bool = False
    ) -> Axis:
        """Return an axis of round numbers around shares in [0, 1]; the whole range without any.

        Steps are 1, 2 or 5 times a power of ten, the smallest that suffices.

        Parameters
        ----------
        most
            Most steps between the values.
        least
            Smallest step, 1, 2 or 5 times a power of ten.
        """
        low, high = min(values, default=0.0), max(values, default=1.0)
        step = _round_step(max((high - low) / most, least))
        first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
        if first == last:
            first, last = (first, last + 1) if (first + 1) * step <= 1 + 1e-9 else (first - 1, last)
        ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        if percent:
            return cls(ticks, tuple(f"{100 * tick:.{max(0, digits - 2)}f}%" for tick in ticks))
        return cls(ticks, tuple(f"{tick:.{digits}f}" for tick in ticks))

    def share(self, value: float) -> float:
        """Return where a value is between the ends, in [0, 1]; one outside is at the nearer end."""
        low, high = self.ticks[0], self.ticks[-1]
        return (min(max(value, low), high) - low) / (high - low)

    def across(self, value: float) -> str:
        """Return a value's place from the left, in per cent."""
        return f"{100 * self.share(value):.2f}%"

    def down(self, value: float, height: float) -> float:
        """Return a value's place from the top of a chart, in pixels."""
        return height * (1 - self.share(value))

    def rows(self, height: float) -> Markup:
        """Draw a line across at each tick, its label at the left edge; the lowest is the base."""
        return Markup("").join(
            line("0%", self.down(tick, height), "100%", self.down(tick, height), css)
            + Markup('<text x="-8" y="{0:.1f}" dy=".35em" text-anchor="end">{1}</text>').format(
                self.down(tick, height), label
            )
            for tick, label, css in zip(
                self.ticks, self.labels, ("base", *["grid"] * len(self.ticks)), strict=False
            )
        )

    def columns(self, height: float, *, lines: bool) -> Markup:
        """Draw each tick's label below the chart, and a line down to it where ``lines``."""
        return Markup("").join(
            (line(self.across(tick), 0, self.across(tick), height, "grid") if lines else Markup(""))
            + Markup('<text x="{0}" y="{1}" text-anchor="middle">{2}</text>').format(
                self.across(tick), f"{height + 18:g}", label
            )
            for tick, label in zip(self.ticks, self.labels, strict=True)
        )


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is no less, to rounding."""
    power = 10.0 ** math.floor(math.log10(least) + 1e-9)
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= least * (1 - 1e-9))


def kept_apart(
    heights: Sequence[float], gap: float, *, top: float = -math.inf, bottom: float
) -> list[float]:
    """Move ascending heights of labels until they are ``gap`` apart, none below ``bottom``."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + gap) if places else max(height, top))
    if places and places[-1] > bottom:
        places[-1] = bottom
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    return places


def line(x1: str, y1: float, x2: str, y2: float, css: str) -> Markup:
    """Draw a line; ``css`` is its class."""
    return Markup('<line class="{4}" x1="{0}" y1="{1:.1f}" x2="{2}" y2="{3:.1f}"/>').format(
        x1, y1, x2, y2, css
    )


def dot(x: str, y: float, radius: float, css: str, title: str | None = None) -> Markup:
    """Draw a circle; ``title`` is shown at the pointer."""
    if title is None:
        return Markup('<circle class="{3}" cx="{0}" cy="{1:.1f}" r="{2}"/>').format(
            x, y, radius, css
        )
    return Markup(
        '<circle class="{3}" cx="{0}" cy="{1:.1f}" r="{2}"><title>{4}</title></circle>'
    ).format(x, y, radius, css, title)
