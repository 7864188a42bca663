"""The comparison's pictures, from its facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from bract.report.comparison.scatter import Point, scatter
from bract.report.comparison.variants import UNDEFENDED, best_baseline
from bract.report.facts.summary import strength
from bract.report.page.charts import COLOURS, Series, line_chart, score_bar

Facts = dict[str, Any]

_LABEL = 18


def comparison_charts(facts: Facts) -> Facts:
    """Return the template's drawings: ``colours``, ``tradeoff``, ``undrawn``, ``charts``, ``bar``.

    ``tradeoff`` is None where no variant has both an accuracy and a scored attack; ``undrawn``
    names the variants that lack one.
    """
    css = variant_colours(facts["rows"])
    points = [p for row in facts["rows"] for p in _points(row, css[row["variant"]])]
    band = baseline_band(facts["rows"])
    drawn = {p.name.partition(",")[0] for p in points}
    return {
        "colours": css,
        "band": band,
        "tradeoff": scatter(
            points,
            title="Mean SSIM of the reconstructions by accuracy, one mark a variant: "
            + "; ".join(p.name for p in points),
            threshold=facts["verdict"]["thresholds"]["ssim"],
            band=band,
        )
        if points
        else None,
        "undrawn": [row["title"] for row in facts["rows"] if row["title"] not in drawn],
        "tiers_drawn": list(dict.fromkeys(p.tier for p in points)),
        "accuracy_chart": _accuracy_chart(facts, css),
        "rounds_shown": sorted({r["round"] for row in facts["rows"] for r in row["rounds"]}),
        "accuracy_at": lambda row, number: _accuracy_at(row, number, facts["measure"]),
        "leakage_chart": _leakage_chart(facts, css),
        "bar": lambda row: _bar(row, facts),
        "share": lambda row, key: _share(row, key, facts["rows"]),
    }


def variant_colours(rows: Sequence[Facts]) -> dict[str, str]:
    """Give the undefended run the ink's colour, the first defenses one each, others ``rest``."""
    css, given = {}, 0
    for row in rows:
        if row["variant"] == UNDEFENDED:
            css[row["variant"]] = "total"
        else:
            css[row["variant"]] = f"c{given}" if given < COLOURS else "rest"
            given += 1
    return css


def _points(row: Facts, colour: str) -> list[Point]:
    """Return a variant's marks, the strongest attack of each tier; the strongest has the label."""
    accuracy = row["shown"]
    if accuracy["value"] is None or row["ssim"]["mean"] is None:
        return []
    points = []
    for tier in row["tiers"]:
        attack = max((a for a in row["attacks"] if a["tier"] == tier), key=strength)
        if attack["ssim"]["mean"] is None:
            continue
        first = tier == row["attack"]["tier"]
        points.append(
            Point(
                name=(
                    f"{row['title']}, {tier}: accuracy {100 * accuracy['value']:.1f} %, "
                    f"SSIM {attack['ssim']['mean']:.2f}"
                ),
                colour=colour,
                x=accuracy["value"],
                x_span=_span(accuracy) if first else None,
                y=attack["ssim"]["mean"],
                y_span=_span(attack["ssim"]),
                best=attack["ssim"]["best"],
                tier=tier,
                label=_short(row["title"]) if first else None,
            )
        )
    return points


def _short(name: str) -> str:
    return name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"


def _span(score: Facts) -> tuple[float, float] | None:
    if score["low"] is None or score["high"] is None:
        return None
    return score["low"], score["high"]


def baseline_band(rows: Sequence[Facts]) -> tuple[float, float] | None:
    """Return lowest and highest of the best baselines without the gradient, over the variants."""
    baselines = [best_baseline(a, "ssim") for row in rows for a in row["attacks"]]
    known = [baseline for baseline in baselines if baseline is not None]
    return (min(known), max(known)) if known else None


_ACCURACY = {"global": "accuracy", "clients": "client_accuracy"}


def _accuracy_at(row: Facts, number: int, measure: str) -> float | None:
    found = [r[_ACCURACY[measure]] for r in row["rounds"] if r["round"] == number]
    return found[0] if found else None


def _accuracy_chart(facts: Facts, css: dict[str, str]) -> Markup | None:
    key = _ACCURACY[facts["measure"]]
    return _by_round(facts, css, "rounds", key, "Accuracy of each variant by round", percent=True)


def _leakage_chart(facts: Facts, css: dict[str, str]) -> Markup | None:
    return _by_round(
        facts,
        css,
        "leakage",
        "ssim_mean",
        "Mean SSIM of each variant's reconstructions by round",
        reference=facts["verdict"]["thresholds"]["ssim"],
    )


def _by_round(
    facts: Facts, css: dict[str, str], rows: str, key: str, title: str, **options: Any
) -> Markup | None:
    series = []
    for row in facts["rows"]:
        line = Series(row["title"], css[row["variant"]], label=css[row["variant"]] != "rest")
        line.points = [(r["round"], r[key]) for r in row[rows] if r[key] is not None]
        series.append(line)
    if not any(line.points for line in series):
        return None
    # The undefended run is drawn last, over the others.
    series.sort(key=lambda line: line.colour == "total")
    last = max(r["round"] for row in facts["rows"] for r in (*row["rounds"], *row["leakage"]))
    return line_chart(series, title=title, last_round=last, label_length=_LABEL, **options)


def _bar(row: Facts, facts: Facts) -> Markup:
    return score_bar(
        row["ssim"],
        baseline=row["baseline_ssim"],
        threshold=facts["verdict"]["thresholds"]["ssim"],
        title="Mean SSIM on a scale from 0 to 1",
    )


def _share(row: Facts, key: str, rows: Sequence[Facts]) -> int | None:
    """Return a cost as per cent of the largest one."""
    most = max((other[key] or 0.0 for other in rows), default=0.0)
    return round(100 * row[key] / most) if most and row[key] is not None else None
