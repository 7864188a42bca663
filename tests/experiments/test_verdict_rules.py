"""Verdicts follow from rules and intervals alone."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from experiments.harness.crossed import crossed_interval
from experiments.papers.declaration import Claim, Experiment
from experiments.papers.results import PaperResult, RowResult, Sample, Unit
from experiments.papers.rules import (
    difference,
    figure,
    judge,
    obstacles_of,
    ratio,
    verdict,
)


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


def test_a_figure_is_over_images_and_networks_where_its_samples_tell_both() -> None:
    values, networks = [0.1, 0.12, 0.8, 0.82] * 2, [0, 0, 1, 1] * 2
    samples = tuple(
        Sample(group=i, image=i, network=n, values={"ssim": v})
        for i, (v, n) in enumerate(zip(values, networks, strict=True))
    )
    crossed = RowResult(name="a", count=1, units={0: Unit(key="k", samples=samples, seconds=1.0)})
    found, alone = figure(crossed, "ssim"), figure(row("a", *values), "ssim")
    assert found is not None and alone is not None
    expected = crossed_interval(values, range(8), networks, bounds=(-1.0, 1.0))
    assert (found.low, found.high) == expected
    assert (found.over, alone.over) == ("images and networks", "groups")
    assert found.bounds[1] - found.bounds[0] > 2 * (alone.bounds[1] - alone.bounds[0])
    share = figure(crossed, "ssim>=0.5")
    assert share is not None and share.bounds[1] - share.bounds[0] > 0.9


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


def declared(rule: dict[str, Any], claim: dict[str, Any], **more: Any) -> Experiment:
    content = experiment(rule).model_dump(by_alias=True)
    return Experiment.model_validate(content | {"claims": [{"says": "so", **claim}], **more})


FASTER = {"kind": "order", "quantity": "seconds", "rows": ["a", "b"], "size": 93.0, "times": True}


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "order", "more": "a", "less": "b"},
        {"kind": "order", "more": "a", "less": "b", "by": 2.0, "times": True},
        {"kind": "order", "more": "a", "less": "b", "by": 93.0},
        {"kind": "order", "more": "b", "less": "a", "by": 93.0, "times": True},
    ],
)
def test_a_rule_that_covers_less_than_its_claim_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="no rule covers the claim 'so'"):
        declared({**rule, "metric": "seconds"}, FASTER)
    enough = {"kind": "order", "more": "a", "less": "b", "by": 93.0, "times": True}
    assert not declared({**enough, "metric": "seconds"}, FASTER).untested


@pytest.mark.parametrize(
    ("rule", "claim", "covers"),
    [
        ({"kind": "at least", "row": "a", "value": 0.5}, ("at least", ["a"], 0.8), False),
        ({"kind": "at least", "row": "a", "value": 0.8}, ("at least", ["a"], 0.8), True),
        ({"kind": "at most", "row": "a", "value": 0.5}, ("at most", ["a"], 0.3), False),
        ({"kind": "at most", "row": "a", "value": 0.3}, ("at least", ["a"], 0.3), False),
        (
            {"kind": "near", "row": "a", "to": "b", "tolerance": 0.2},
            ("near", ["a", "b"], 0.1),
            False,
        ),
        (
            {"kind": "near", "row": "a", "to": "b", "tolerance": 0.1},
            ("near", ["a", "b"], 0.1),
            True,
        ),
        ({"kind": "near", "row": "a", "tolerance": 0.1}, ("near", ["a", "b"], 0.1), False),
    ],
)
def test_a_rule_covers_quantity_direction_rows_and_size(
    rule: dict[str, Any], claim: tuple[str, list[str], float], covers: bool
) -> None:
    kind, rows, size = claim
    stated = Claim(says="so", kind=kind, quantity="ssim", rows=tuple(rows), size=size)
    made = experiment(rule).rules[0]
    assert stated.covered_by(made) is covers
    assert not stated.model_copy(update={"quantity": "psnr"}).covered_by(made)


def test_a_ratio_is_of_each_pair_and_has_an_interval() -> None:
    times = {"kind": "order", "more": "a", "less": "b", "by": 3.0, "times": True}
    a, b = row("a", 4.0, 8.0, 4.0, 8.0), row("b", 1.0, 2.0, 1.0, 2.0)
    found = ratio(a, b, "ssim")
    assert found is not None and found.mean == pytest.approx(4.0)
    assert answer(times, a, b) == "holds"
    assert answer({**times, "by": 5.0}, a, b) == "contradicted"
    assert ratio(row("a", 0.0, 1.0), b, "ssim") is None


def test_a_loss_is_allowed_up_to_its_size_and_a_gain_is_none() -> None:
    rule = {"kind": "order", "more": "a", "less": "b", "by": -0.05}
    assert answer(rule, row("a", 0.9, 0.92, 0.91), row("b", 0.8, 0.81, 0.8)) == "holds"
    assert answer(rule, row("a", 0.7, 0.71, 0.7), row("b", 0.8, 0.81, 0.81)) == "contradicted"


def obstacles(declared: Experiment, *rows: RowResult) -> list[str]:
    result = PaperResult(
        experiment="p/t", scale="laptop", command="", device="", versions={}, rows=rows
    )
    judged = [found for r in declared.rules if (found := judge(declared, r, result, None))]
    return obstacles_of(declared, "smoke", result, judged)


def test_without_a_positive_control_or_below_a_floor_nothing_is_decided() -> None:
    rule = {"kind": "at most", "row": "b", "value": 0.3}
    control = [{"kind": "at least", "says": "it works", "metric": "ssim", "row": "a", "value": 0.5}]
    covered = {"kind": "at most", "quantity": "ssim", "rows": ["b"], "size": 0.3}
    made = declared(rule, covered, controls=control)
    hidden = row("b", 0.1, 0.1, 0.12)
    assert obstacles(made, row("a", 0.9, 0.8, 0.9), hidden) == []
    (reason,) = obstacles(made, row("a", 0.1, 0.2, 0.1), hidden)
    assert reason.startswith("positive control: it works")
    low = declared(rule, covered, floor={"idlg": 1500}, set={"attack": "idlg", "iterations": 100})
    assert "its floor is 1500" in obstacles(low, row("a", 0.9, 0.8), hidden)[0]
    assert verdict([], ["anything"]) == "undecided"


def test_a_claim_without_a_rule_keeps_a_verdict_from_reproduced_and_not_from_its_opposite() -> None:
    made = declared({"kind": "at most", "row": "b", "value": 0.3}, {"untested": "not run"})
    assert obstacles(made, row("b", 0.1, 0.1, 0.12)) == ["untested: so (not run)"]
    assert obstacles(made, row("b", 0.8, 0.81, 0.8)) == []
