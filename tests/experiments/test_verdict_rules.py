"""Verdicts follow from rules and intervals alone."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.papers.declaration import Experiment
from experiments.papers.results import PaperResult, RowResult, Sample, Unit
from experiments.papers.rules import difference, figure, judge, verdict


def row(name: str, *values: float, metric: str = "ssim", first: int = 0) -> RowResult:
    samples = tuple(
        Sample(group=first + i, values={metric: value}) for i, value in enumerate(values)
    )
    return RowResult(name=name, count=1, units={0: Unit(key="k", samples=samples, seconds=1.0)})


def experiment(rule: dict[str, Any], published: float = 0.9) -> Experiment:
    printed = [{"of": "theirs", "data": "mnist", "values": {"ssim": published}}]
    return Experiment.model_validate(
        {
            "paper": "p",
            "item": "t",
            "number": "1",
            "title": "t",
            "kind": "reconstruction",
            "rows": [{"name": "a", "published": printed}, {"name": "b"}],
            "scales": {"smoke": {}},
            "rules": [{"says": "it is so", "metric": "ssim", **rule}],
        }
    )


def answer(rule: dict[str, Any], *rows: RowResult, data: str | None = "mnist") -> str | None:
    declared = experiment(rule)
    result = PaperResult(
        experiment="p/t", scale="laptop", command="", device="", versions={}, rows=rows
    )
    found = judge(declared, declared.rules[0], result, data)
    return None if found is None else found.answer


ORDER = {"kind": "order", "more": "a", "less": "b"}


def test_an_order_is_of_paired_differences() -> None:
    # Both rows spread by 0.8, their difference is 0.1 each time.
    a, b = row("a", 0.1, 0.5, 0.9, 0.3), row("b", 0.0, 0.39, 0.8, 0.2)
    assert answer(ORDER, a, b) == "holds"
    assert (
        answer(ORDER, b.model_copy(update={"name": "a"}), a.model_copy(update={"name": "b"}))
        == "contradicted"
    )


def test_an_order_of_other_images_needs_intervals_that_do_not_touch() -> None:
    a, b = row("a", 0.1, 0.5, 0.9, 0.3), row("b", 0.0, 0.39, 0.8, 0.2, first=10)
    assert answer(ORDER, a, b) == "open"
    found = difference(a, b, "ssim")
    assert found is not None and found.low is not None and found.low < -0.5


def test_a_bound_stays_open_while_the_interval_holds_it() -> None:
    rule = {"kind": "at least", "row": "a", "value": 0.5}
    assert answer(rule, row("a", 0.7, 0.72, 0.71)) == "holds"
    assert answer(rule, row("a", 0.2, 0.22, 0.21)) == "contradicted"
    assert answer(rule, row("a", 0.2, 0.9, 0.5)) == "open"
    assert answer({**rule, "kind": "at most"}, row("a", 0.2, 0.22, 0.21)) == "holds"


def test_a_published_figure_binds_on_the_paper_s_own_data_alone() -> None:
    rule = {"kind": "near", "row": "a", "tolerance": 0.05}
    assert answer(rule, row("a", 0.9, 0.91, 0.89)) == "holds"
    assert answer(rule, row("a", 0.5, 0.51, 0.49)) == "contradicted"
    assert answer(rule, row("a", 0.5, 0.51, 0.49), data="digits") is None


def test_near_another_row_is_of_the_difference() -> None:
    rule = {"kind": "near", "row": "a", "to": "b", "tolerance": 0.05}
    assert answer(rule, row("a", 0.2, 0.5), row("b", 0.21, 0.51)) == "holds"


def test_what_was_not_measured_is_open() -> None:
    assert answer(ORDER, row("a", 0.5, 0.6)) == "open"


def test_one_contradiction_is_enough_and_all_must_hold() -> None:
    class Fake:
        def __init__(self, answer: str) -> None:
            self.answer = answer

    def of(*answers: str) -> str:
        made: Any = [Fake(one) for one in answers]
        return verdict(made)

    assert of("holds", "holds") == "reproduced"
    assert of("holds", "open") == "undecided"
    assert of("holds", "open", "contradicted") == "not reproduced"
    assert of() == "undecided"


def test_a_share_over_a_threshold_is_counted_from_the_values() -> None:
    found = figure(row("a", 0.1, 0.3, 0.5, 0.9), "ssim>=0.3")
    assert found is not None
    assert found.mean == 0.75
    # Clopper and Pearson for 3 of 4.
    assert found.low == pytest.approx(0.194, abs=0.01)
    assert found.high == pytest.approx(0.994, abs=0.01)
