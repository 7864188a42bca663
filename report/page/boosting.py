"""FedBoosting in the report: the weights by round, and the scores V and T behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bract.config.config import FedBoostingConfig
from bract.report.order import mean
from bract.report.page.charts import Series, line_chart
from bract.schema import Report
from bract.schema.report_rows import BoostingFacts

HEAT_CELLS = 4000
"""Cells of V on the page, over all rounds; the last round is shown whatever its size."""

HEAT_PERCENT = 50
"""Share of colour in the best cell; more would leave its figure too little contrast."""


@dataclass(frozen=True)
class HeatCell:
    """One score, and its share of colour in per cent."""

    value: float | None
    heat: int | None


@dataclass(frozen=True)
class HeatRow:
    """One fused model: its scores on every client, T, and the weight with its bar in per cent."""

    client: str
    cells: list[HeatCell]
    mean: float | None
    training: float | None
    weight: float
    bar: int


@dataclass(frozen=True)
class HeatMap:
    """One round's V."""

    round: int
    signal: str
    caption: str
    rows: list[HeatRow]


@dataclass(frozen=True)
class BoostingView:
    """The section: the last round, the others (latest first), and how many rounds are left out.

    ``chart`` is None for a single round.
    """

    weighting: str | None
    chart: Markup | None
    last: HeatMap
    others: list[HeatMap]
    left: int


def boosting_view(facts: Report, css: dict[str, str]) -> BoostingView | None:
    """Return the section's content; None where no round was boosted."""
    rounds = facts.boosting
    if not rounds:
        return None
    shown, cells = [rounds[-1]], 0
    for row in reversed(rounds[:-1]):
        cells += len(row.clients) ** 2
        if cells > HEAT_CELLS:
            break
        shown.append(row)
    strategy = facts.config.strategy if facts.config else None
    return BoostingView(
        weighting=strategy.weighting if isinstance(strategy, FedBoostingConfig) else None,
        chart=weights_chart(rounds, css) if len(rounds) > 1 else None,
        last=heat_map(shown[0]),
        others=[heat_map(row) for row in shown[1:]],
        left=len(rounds) - len(shown),
    )


def heat_map(row: BoostingFacts) -> HeatMap:
    """Return one round's V, shaded from its worst to its best score, with T and the weights."""
    known = [v for line in row.V for v in line if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    less_is_better = row.signal == "loss"

    def heat(value: float | None) -> int | None:
        if value is None:
            return None
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEAT_PERCENT * (1 - share if less_is_better else share))

    most = max(row.weights, default=0.0) or 1.0
    lines = zip(row.clients, row.V, row.T, row.weights, strict=True)
    return HeatMap(
        round=row.round,
        signal=row.signal,
        caption=_caption(row, low, high) if known else "No scores could be used",
        rows=[
            HeatRow(
                client=client,
                cells=[HeatCell(value, heat(value)) for value in scores],
                mean=mean(scores),
                training=training,
                weight=weight,
                bar=round(100 * weight / most),
            )
            for client, scores, training, weight in lines
        ],
    )


def _caption(row: BoostingFacts, low: float, high: float) -> str:
    best, worst = (low, high) if row.signal == "loss" else (high, low)
    text = f"every fused model on every client, shaded from {worst:.3f} to {best:.3f} (best)"
    lost = [name for j, name in enumerate(row.clients) if all(line[j] is None for line in row.V)]
    return f"{text}; no usable scores from {', '.join(lost)}" if lost else text


def weights_chart(rounds: Sequence[BoostingFacts], css: dict[str, str]) -> Markup:
    """Draw each client's weight by round; dashed, where all weights would be equal."""
    series = []
    for client, colour in css.items():
        line = Series(client, colour, label=colour != "rest")
        line.points = [
            (row.round, row.weights[row.clients.index(client)])
            for row in rounds
            if client in row.clients
        ]
        series.append(line)
    counts = {len(row.clients) for row in rounds}
    most = max(weight for row in rounds for weight in row.weights)
    return line_chart(
        series,
        title="Weight of each client by round",
        last_round=max(row.round for row in rounds),
        high=min(1.0, math.ceil(10 * most * 1.05) / 10),
        reference=1 / counts.pop() if len(counts) == 1 else None,
    )
