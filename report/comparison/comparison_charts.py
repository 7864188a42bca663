"""The comparison's pictures, from its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bract.config.audit import TIERS
from bract.report.comparison.scatter import Point, scatter
from bract.report.comparison.variants import UNDEFENDED, best_baseline
from bract.report.order import strength
from bract.report.page.charts import COLOURS, Series, line_chart, score_bar
from bract.schema.comparison import Comparison, VariantRound, VariantRow
from bract.schema.report_rows import Spread
from bract.schema.verdict import UNJUDGED

_LABEL = 18

Points = Sequence[tuple[int, float | None]]
"""Values by round."""


@dataclass(frozen=True)
class ComparisonCharts:
    """The drawings of a comparison.

    ``tradeoff`` is None where no variant has both an accuracy and a scored attack; ``undrawn``
    names the variants that lack one. ``tiers`` are those drawn, ``band`` is of the best baselines.
    """

    colours: dict[str, str]
    band: tuple[float, float] | None
    tradeoff: Markup | None
    undrawn: list[str]
    tiers: list[str]
    accuracy: Markup | None
    leakage: Markup | None
    facts: Comparison

    @property
    def rounds(self) -> list[int]:
        """Rounds with an accuracy's row in the table."""
        return sorted({r.round for row in self.facts.rows for r in row.rounds})

    def accuracy_at(self, row: VariantRow, number: int) -> float | None:
        """Return the accuracy that is compared, after one round."""
        found = [_accuracy(r, self.facts.measure) for r in row.rounds if r.round == number]
        return found[0] if found else None

    def bar(self, row: VariantRow) -> Markup:
        """Draw the mean SSIM of a variant with its interval, threshold and best baseline."""
        return score_bar(
            row.attack.ssim if row.attack else Spread(),
            baseline=best_baseline(row.attack, "ssim"),
            threshold=self.facts.verdict.ssim,
            title="Mean SSIM on a scale from 0 to 1",
        )

    def share(self, row: VariantRow, cost: str) -> int | None:
        """Return a cost as per cent of the largest one."""
        most = max((getattr(other.costs, cost) or 0.0 for other in self.facts.rows), default=0.0)
        value = getattr(row.costs, cost)
        return round(100 * value / most) if most and value is not None else None


def comparison_charts(facts: Comparison) -> ComparisonCharts:
    """Draw a comparison."""
    css = variant_colours(facts.rows)
    points = [p for row in facts.rows for p in _points(row, css[row.variant])]
    band = baseline_band(facts.rows)
    drawn = {p.name.partition(",")[0] for p in points}
    tradeoff = None
    if points:
        names = "; ".join(p.name for p in points)
        tradeoff = scatter(
            points,
            title=f"Mean SSIM of the reconstructions by accuracy, one mark a variant: {names}",
            threshold=facts.verdict.ssim,
            band=band,
        )
    accuracy = {row.variant: _accuracies(row, facts.measure) for row in facts.rows}
    leakage: dict[str, Points] = {
        row.variant: [] if row.level in UNJUDGED else [(r.round, r.ssim) for r in row.rounds]
        for row in facts.rows
    }
    return ComparisonCharts(
        colours=css,
        band=band,
        tradeoff=tradeoff,
        undrawn=[row.title for row in facts.rows if row.title not in drawn],
        tiers=list(dict.fromkeys(p.tier for p in points)),
        accuracy=_by_round(facts, css, accuracy, "Accuracy of each variant by round", percent=True),
        leakage=_by_round(
            facts,
            css,
            leakage,
            "Mean SSIM of each variant's reconstructions by round",
            reference=facts.verdict.ssim,
        ),
        facts=facts,
    )


def variant_colours(rows: Sequence[VariantRow]) -> dict[str, str]:
    """Give the undefended run the ink's colour, the first defenses one each, others ``rest``."""
    css, given = {}, 0
    for row in rows:
        if row.variant == UNDEFENDED:
            css[row.variant] = "total"
        else:
            css[row.variant] = f"c{given}" if given < COLOURS else "rest"
            given += 1
    return css


def _points(row: VariantRow, colour: str) -> list[Point]:
    """Return a variant's marks, the strongest attack of each tier; the strongest has the label."""
    accuracy, strongest = row.shown, row.attack
    if accuracy.value is None or strongest is None or strongest.ssim.mean is None:
        return []
    if row.level in UNJUDGED:
        return []
    points = []
    for tier in TIERS:
        attack = max((a for a in row.attacks if a.tier == tier), key=strength, default=None)
        if attack is None or attack.ssim.mean is None:
            continue
        first = tier == strongest.tier
        points.append(
            Point(
                name=(
                    f"{row.title}, {tier}: accuracy {100 * accuracy.value:.1f} %, "
                    f"SSIM {attack.ssim.mean:.2f}"
                ),
                colour=colour,
                x=accuracy.value,
                x_span=_span(accuracy.low, accuracy.high) if first else None,
                y=attack.ssim.mean,
                y_span=_span(attack.ssim.low, attack.ssim.high),
                best=attack.ssim.best,
                tier=tier,
                label=_short(row.title) if first else None,
            )
        )
    return points


def _short(name: str) -> str:
    return name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"


def _span(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


def baseline_band(rows: Sequence[VariantRow]) -> tuple[float, float] | None:
    """Return lowest and highest of the best baselines without the gradient, over the variants."""
    baselines = [best_baseline(a, "ssim") for row in rows for a in row.attacks]
    known = [baseline for baseline in baselines if baseline is not None]
    return (min(known), max(known)) if known else None


def _accuracy(row: VariantRound, measure: str) -> float | None:
    return row.client_accuracy if measure == "clients" else row.accuracy


def _accuracies(row: VariantRow, measure: str) -> Points:
    return [(r.round, _accuracy(r, measure)) for r in row.rounds]


def _by_round(
    facts: Comparison,
    css: dict[str, str],
    points: Mapping[str, Points],
    title: str,
    **options: Any,
) -> Markup | None:
    series = []
    for row in facts.rows:
        line = Series(row.title, css[row.variant], label=css[row.variant] != "rest")
        line.points = [
            (number, value) for number, value in points[row.variant] if value is not None
        ]
        series.append(line)
    if not any(line.points for line in series):
        return None
    # The undefended run is drawn last, over the others.
    series.sort(key=lambda line: line.colour == "total")
    last = max(r.round for row in facts.rows for r in row.rounds)
    return line_chart(series, title=title, last_round=last, label_length=_LABEL, **options)
