"""Charts: where things are drawn, by hand-worked positions."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from bract.report.page import axis
from bract.report.page.charts import HEIGHT, Series, colours, line_chart, loss_curve, score_bar
from bract.schema.report_rows import Spread


def test_values_are_placed_by_round_and_height() -> None:
    svg = line_chart([Series("a", "c0", points=[(1, 0.5), (2, 1.0)])], title="t", last_round=4)
    assert re.search(
        rf'<line class="joined" x1="25.00%" y1="{HEIGHT / 2:.1f}" x2="50.00%" y2="0.0"', svg
    )


def test_values_outside_the_axis_are_drawn_at_its_end() -> None:
    svg = line_chart([Series("a", "c0", points=[(0, -0.3), (1, 7.0)])], title="t", last_round=1)
    assert f'x1="0.00%" y1="{HEIGHT:.1f}" x2="100.00%" y2="0.0"' in svg


@pytest.mark.parametrize("base", [0.0, 0.5, 0.95])
def test_end_labels_keep_their_distance(base: float) -> None:
    series = [Series(f"client-{i}", f"c{i}", points=[(0, base + 0.01 * i)]) for i in range(6)]
    svg = line_chart(series, title="t", last_round=1)
    heights = sorted(float(y) for y in re.findall(r'end" x="100%" y="([\d.]+)"', svg))
    assert len(heights) == 6
    assert all(b - a >= 14.9 for a, b in pairwise(heights))
    assert heights[-1] <= HEIGHT


def test_names_are_escaped_and_shortened() -> None:
    line = Series("<script>alert(1)</script>", "c0", points=[(0, 0.5)])
    svg = line_chart([line], title='"><script>', last_round=1)
    assert "<script>" not in svg
    assert "&lt;script&gt;ale…" in svg


def test_only_the_first_clients_have_a_colour_of_their_own() -> None:
    given = colours([f"client-{i}" for i in range(8)])
    assert len(set(given.values())) == 7
    assert given["client-6"] == given["client-7"] == "rest"


def test_a_bar_shows_mean_interval_baseline_and_threshold() -> None:
    score = Spread(mean=0.25, low=0.2, high=0.4)
    svg = score_bar(score, baseline=0.7, threshold=0.5, title="t")
    assert '<line class="interval" x1="20.0%" y1="8.0" x2="40.0%"' in svg
    assert '<circle class="point" cx="25.0%"' in svg
    assert (
        '<line class="baseline" x1="70.0%"' in svg and '<line class="reference" x1="50.0%"' in svg
    )
    bare = score_bar(
        Spread(mean=0.25, low=None, high=None), baseline=None, threshold=0.5, title="t"
    )
    assert "interval" not in bare and "baseline" not in bare


def test_a_loss_curve_falls_from_left_to_right() -> None:
    svg = loss_curve([[0, 1.0], [10, 0.1], [20, None], [30, 0.01]])
    assert svg is not None
    assert 'points="0.0,2.0 33.3,12.0 100.0,22.0"' in svg
    assert loss_curve([[0, 1.0]]) is None
    assert loss_curve([[0, 1.0], [1, 0.0], [2, None]]) is not None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.872, 0.978, [0.86, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98]),
        (0.951, 0.969, [0.95, 0.955, 0.96, 0.965, 0.97]),
        (0.9, 0.9, [0.9, 0.9002]),
        (1.0, 1.0, [0.9998, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(
    low: float, high: float, expected: list[float]
) -> None:
    found = axis.Axis.around([low, high], most=6, least=2e-4)
    assert found.ticks == pytest.approx(expected)
    assert len(set(found.labels)) == len(found.ticks)
    assert [float(label) for label in found.labels] == pytest.approx(found.ticks)


def test_an_axis_of_counts_ends_with_the_last_and_crowds_no_label() -> None:
    assert axis.Axis.counting(3).labels == ("0", "1", "2", "3")
    assert axis.Axis.counting(17).labels == ("0", "3", "6", "9", "12", "17")
