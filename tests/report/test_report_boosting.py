"""FedBoosting in the report: the scores and weights of each round, and nothing for the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from reporting import gather

from bract.config import build_config, dump_config
from bract.report import write_report
from bract.report.page import boosting
from bract.report.page.boosting import HEAT_PERCENT, heat_map, weights_chart
from bract.schema.report_rows import BoostingFacts

CLIENTS = ["client-0", "client-1", "client-2"]
V = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.85, 0.75, 0.65]]


def record(**changes: Any) -> dict[str, Any]:
    return {
        "clients": CLIENTS,
        "V": V,
        "T": [0.95, 0.55, 0.9],
        "weights": [0.5, 0.125, 0.375],
        "signal": "accuracy",
        **changes,
    }


def row_of(number: int = 1, **changes: Any) -> BoostingFacts:
    return BoostingFacts(round=number, **record(**changes))


def boost(root: Path, *records: dict[str, Any] | None) -> None:
    """Add the records to rounds 1, 2, ... of ``metrics.jsonl``."""
    path = root / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, extra in zip(rows[1:], records, strict=False):
        if extra is not None:
            row["boosting"] = extra
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def section(page: Path) -> str:
    found = re.search(r'<section id="boosting">.*?</section>', page.read_text(), re.DOTALL)
    assert found
    return found[0]


def test_a_run_without_boosting_has_no_such_section(make_run: Any, parse: Any) -> None:
    page = write_report(make_run(rounds=2))
    assert "boosting" not in parse(page.read_text()).ids
    assert "FedBoosting" not in parse(page.read_text()).text
    assert gather(page.parent)["boosting"] == []


def test_the_last_round_is_shown_and_the_others_fold(make_run: Any, parse: Any) -> None:
    root = make_run(rounds=3)
    boost(root, record(), record(), record(V=[[0.111] * 3, *V[1:]]))
    text = section(write_report(root))
    last, _, others = text.partition("<details")
    assert "Round 3" in last and "0.111" in last
    assert "Round 1" not in last and others.index("Round 2") < others.index("Round 1")
    assert others.count("<table") == 2


def test_every_score_stands_in_its_row_and_column(make_run: Any) -> None:
    root = make_run(rounds=1)
    boost(root, record())
    text = section(write_report(root))
    rows = re.findall(r"<tr>\s*<th scope=\"row\">.*?</tr>", text, re.DOTALL)
    figures = [re.findall(r"(\d\.\d{3})</td>", row) for row in rows]
    assert figures == [
        ["0.900", "0.800", "0.700", "0.800", "0.950", "0.500"],
        ["0.600", "0.500", "0.400", "0.500", "0.550", "0.125"],
        ["0.850", "0.750", "0.650", "0.750", "0.900", "0.375"],
    ]


def test_the_best_score_is_the_darkest() -> None:
    cells = [[cell.heat for cell in line.cells] for line in heat_map(row_of()).rows]
    assert cells[0][0] == HEAT_PERCENT and cells[1][2] == 0
    assert cells[1][0] == round(HEAT_PERCENT * 0.4)


def test_the_least_loss_is_the_darkest() -> None:
    shown = heat_map(row_of(signal="loss"))
    assert shown.rows[1].cells[2].heat == HEAT_PERCENT
    assert shown.rows[0].cells[0].heat == 0
    assert "from 0.900 to 0.400 (best)" in shown.caption


def test_equal_scores_share_one_shade() -> None:
    shown = heat_map(row_of(V=[[0.5] * 3] * 3))
    heats = {cell.heat for line in shown.rows for cell in line.cells}
    assert heats == {HEAT_PERCENT // 2}


def test_a_validator_without_usable_scores_is_named(make_run: Any) -> None:
    root = make_run(rounds=1)
    boost(root, record(V=[[a, None, c] for a, _, c in V], T=[None, 0.5, 0.6]))
    text = section(write_report(root))
    assert "no usable scores from client-1" in text
    assert text.count('class="cell none"') == 3
    assert "0.800" in text, "the mean is over those who answered: (0.9 + 0.7) / 2"


def test_no_scores_at_all_are_said_to_be_none() -> None:
    shown = heat_map(row_of(V=[[None] * 3] * 3))
    assert shown.caption == "No scores could be used"
    assert shown.rows[0].mean is None


def test_weights_are_drawn_below_the_next_tenth_with_the_uniform_weight_dashed() -> None:
    rounds = [row_of(1), row_of(2, weights=[0.25, 0.25, 0.5])]
    svg = weights_chart(rounds, {"client-0": "c0", "client-1": "c1", "client-2": "c2"})
    # The axis ends at 0.6: 0.5 * 1.05 rounded up; 0.5 is 1/6 below its top of 190 pixels.
    assert ">0.6</text>" in svg
    assert '<line class="joined" x1="50.00%" y1="31.7" x2="100.00%" y2="110.8"' in svg
    assert re.search(r'class="reference" x1="0%" y1="84\.4"', svg)


def test_a_client_that_missed_a_round_has_no_point_there() -> None:
    two = record(clients=CLIENTS[:2], V=[[0.5, 0.5]] * 2, T=[0.5, 0.5], weights=[0.5, 0.5])
    rounds = [row_of(1), BoostingFacts(round=2, **two)]
    svg = weights_chart(rounds, {name: f"c{i}" for i, name in enumerate(CLIENTS)})
    assert svg.count('class="joined"') == 2
    assert "reference" not in svg, "uniform is another value in each round"


def test_a_single_round_has_no_chart_and_the_weighting_is_named(make_run: Any) -> None:
    root = make_run(rounds=1)
    boost(root, record())
    config = {"clients": 3, "rounds": 1, "strategy": {"name": "fedboosting"}}
    (root / "config.yaml").write_text(dump_config(build_config(config)))
    text = section(write_report(root))
    assert "<svg" not in text
    assert "weighting: softmax" in text


def test_many_rounds_are_cut_and_the_page_says_so(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(rounds=3)
    boost(root, record(), record(), record())
    monkeypatch.setattr(boosting, "HEAT_CELLS", 9)
    text = section(write_report(root))
    assert text.count("<table") == 2
    assert "1 earlier round in <code>report.json</code> only" in text


@pytest.mark.parametrize("broken", [{"weights": [1.0]}, {"V": [[0.5]] * 3}, {"T": []}])
def test_a_record_that_does_not_fit_its_clients_is_skipped_by_name(
    make_run: Any, broken: dict[str, Any]
) -> None:
    root = make_run(rounds=2)
    boost(root, record(), record(**broken))
    facts = gather(root)
    assert [row["round"] for row in facts["boosting"]] == [1]
    assert facts["skipped"][0]["file"] == "metrics.jsonl"
    assert "V, T and weights do not fit 3 clients" in facts["skipped"][0]["reason"]


def test_hostile_client_names_stay_text(make_run: Any, parse: Any) -> None:
    root = make_run(rounds=1)
    name = "<script>alert(1)</script>"
    boost(root, record(clients=[name, "b", "c"]))
    page = parse(write_report(root).read_text())
    assert "script" not in page.tags and name in page.text
