"""FedBoosting in the report: the weights by round, and the scores V and T behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from bract.report.facts.summary import mean
from bract.report.page.charts import Series, line_chart

Facts = dict[str, Any]

HEAT_CELLS = 4000
"""Cells of V on the page, over all rounds; the last round is shown whatever its size."""

HEAT_PERCENT = 50
"""Share of colour in the best cell; more would leave its figure too little contrast."""


def boosting_view(facts: Facts, css: dict[str, str]) -> Facts | None:
    """Return the section's content; None where no round was boosted.

    ``last`` and ``others`` (latest first) are heat maps with ``rows``, one a fused model; ``left``
    counts the rounds that are too many for the page. ``chart`` is None for a single round.
    """
    rounds = facts["boosting"]
    if not rounds:
        return None
    shown, cells = [rounds[-1]], 0
    for row in reversed(rounds[:-1]):
        cells += len(row["clients"]) ** 2
        if cells > HEAT_CELLS:
            break
        shown.append(row)
    strategy = (facts["config"] or {}).get("strategy", {})
    return {
        "weighting": strategy["weighting"] if strategy.get("name") == "fedboosting" else None,
        "chart": weights_chart(rounds, css) if len(rounds) > 1 else None,
        "last": heat_map(shown[0]),
        "others": [heat_map(row) for row in shown[1:]],
        "left": len(rounds) - len(shown),
    }


def heat_map(row: Facts) -> Facts:
    """Return one round's V, shaded from its worst to its best score, with T and the weights."""
    known = [v for line in row["V"] for v in line if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    less_is_better = row["signal"] == "loss"

    def heat(value: float | None) -> int | None:
        if value is None:
            return None
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEAT_PERCENT * (1 - share if less_is_better else share))

    most = max(row["weights"], default=0.0) or 1.0
    lines = zip(row["clients"], row["V"], row["T"], row["weights"], strict=True)
    return {
        "round": row["round"],
        "signal": row["signal"],
        "caption": _caption(row, low, high) if known else "Nobody's scores could be used",
        "rows": [
            {
                "client": client,
                "cells": [{"value": value, "heat": heat(value)} for value in scores],
                "mean": mean(scores),
                "training": training,
                "weight": weight,
                "bar": round(100 * weight / most),
            }
            for client, scores, training, weight in lines
        ],
    }


def _caption(row: Facts, low: float, high: float) -> str:
    best, worst = (low, high) if row["signal"] == "loss" else (high, low)
    text = f"every fused model on every client, shaded from {worst:.3f} to {best:.3f} (best)"
    lost = [
        name for j, name in enumerate(row["clients"]) if all(line[j] is None for line in row["V"])
    ]
    return f"{text}; no usable scores from {', '.join(lost)}" if lost else text


def weights_chart(rounds: Sequence[Facts], css: dict[str, str]) -> Markup:
    """Draw each client's weight by round; dashed, where all weights would be equal."""
    series = []
    for client, colour in css.items():
        line = Series(client, colour, label=colour != "rest")
        line.points = [
            (row["round"], row["weights"][row["clients"].index(client)])
            for row in rounds
            if client in row["clients"]
        ]
        series.append(line)
    counts = {len(row["clients"]) for row in rounds}
    most = max(weight for row in rounds for weight in row["weights"])
    return line_chart(
        series,
        title="Weight of each client by round",
        last_round=max(row["round"] for row in rounds),
        high=min(1.0, math.ceil(10 * most * 1.05) / 10),
        reference=1 / counts.pop() if len(counts) == 1 else None,
    )
