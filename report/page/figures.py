"""The report's charts, from its facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bract.config.audit import Tier
from bract.report.order import strength
from bract.report.page.charts import COLOURS, Series, colours, line_chart, score_bar
from bract.schema import Report
from bract.schema.inputs import ImageOutline
from bract.schema.report_rows import AttackRow, ClientFacts, LeakageRow


@dataclass(frozen=True)
class LeakageChart:
    """The primary score by round under one attack of one tier on one input, and its rows."""

    attack: str
    tier: Tier
    svg: Markup
    rows: list[LeakageRow]
    measure: str


def client_colours(facts: Report) -> dict[str, str]:
    """Return a colour class for each client; with many clients the worst hit are coloured."""
    rows = facts.clients
    if len(rows) > COLOURS:
        rows = sorted(rows, key=_worst_first)
    return colours([row.client for row in rows])


def _worst_first(row: ClientFacts) -> tuple[float, ...]:
    found = strength(row.strongest) if row.strongest else (-2.0, -2.0, -2.0)
    return tuple(-value for value in found)


def leakage_charts(facts: Report, css: dict[str, str]) -> list[LeakageChart]:
    """Return one chart of the primary score by round for each attack, tier and input."""
    charts = []
    seen = dict.fromkeys((row.attack_name, row.tier, row.input) for row in facts.leakage)
    for attack, tier, kind in seen:
        about = (attack, tier, kind)
        rows = [r for r in facts.leakage if (r.attack_name, r.tier, r.input) == about]
        measure = rows[0].measure
        pictured = measure == ImageOutline.primary.name
        clients = [name for name in css if any(r.client == name for r in rows)]
        series = [
            _client_series(facts, name, css[name], _shift(i, min(len(clients), COLOURS)), rows)
            for i, name in enumerate(clients)
        ]
        svg = line_chart(
            series,
            title=f"Mean {measure} of reconstructions by round and client, {attack}, {tier}",
            last_round=_last_round(facts),
            reference=facts.verdict.thresholds.ssim if pictured else None,
        )
        charts.append(LeakageChart(attack, tier, svg, rows, measure))
    return charts


def _shift(position: int, clients: int) -> float:
    return min(9.0, 36.0 / clients) * (position - (clients - 1) / 2)


def _client_series(
    facts: Report, client: str, css: str, shift: float, rows: Sequence[LeakageRow]
) -> Series:
    line = Series(client, css, shift=shift, label=css != "rest")
    mine = [r for r in rows if r.client == client]
    means = [(r.round, r.primary) for r in mine]
    line.points = [(number, value) for number, value in means if value is not None]
    if css == "rest":
        return line
    ticks = [(r.round, r.baseline) for r in mine]
    line.ticks = [(number, value) for number, value in ticks if value is not None]
    for o in facts.observations:
        if o.client == client and o.row_key == mine[0].row_key:
            line.marks += [
                (o.round, near, bool(image.leaked))
                for image in o.images
                if image.scores and (near := image.scores.primary) is not None
            ]
    return line


def accuracy_chart(facts: Report, css: dict[str, str]) -> Markup | None:
    """Return accuracy by round: the global model's, and each client's on its own validation data.

    None where no round recorded any.
    """
    whole = Series("global", "total")
    whole.points = [(r.round, r.accuracy) for r in facts.rounds if r.accuracy is not None]
    series = []
    for name, colour in css.items():
        line = Series(name, colour, label=colour != "rest")
        line.points = [
            (r.round, accuracy)
            for r in facts.rounds
            if name in r.clients and (accuracy := r.clients[name].validation_accuracy) is not None
        ]
        series.append(line)
    if not any(line.points for line in [whole, *series]):
        return None
    title = "Accuracy of the global model and of each client by round"
    return line_chart([*series, whole], title=title, last_round=_last_round(facts), percent=True)


def bar(row: AttackRow, facts: Report) -> Markup:
    """Return an attack row's mean SSIM as a bar with interval, threshold and best baseline."""
    baselines = [b.ssim for b in row.baselines.values() if b.ssim is not None]
    return score_bar(
        row.ssim,
        baseline=max(baselines, default=None),
        threshold=facts.verdict.thresholds.ssim,
        title="Mean SSIM on a scale from 0 to 1",
    )


def _last_round(facts: Report) -> int:
    rounds = [row.round for row in facts.rounds] + [row.round for row in facts.leakage]
    return max([*rounds, facts.run.rounds_planned or 0])
