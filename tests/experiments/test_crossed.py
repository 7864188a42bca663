"""Two-way cluster-robust intervals, against hand computation, an independent formula and t."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from bract.audit.intervals import mean_interval
from experiments.harness.crossed import crossed_interval, equivalence
from experiments.harness.scores import columns, gain_over


def test_a_square_of_two_by_two_by_hand() -> None:
    # Values 1, 3, 5, 11 of images a a b b and networks x y x y; mean 5, deviations -4 -2 0 6.
    # By image: sums -6 and 6, 72 * 2 / 16 = 9. By network: -4 and 4, 32 * 2 / 16 = 4.
    # By pair: 16 + 4 + 0 + 36 = 56, 56 * 4/3 / 16 = 14/3. 9 + 4 - 14/3 = 25/3, which is below 9.
    found = crossed_interval([1, 3, 5, 11], list("aabb"), list("xyxy"))
    assert found == pytest.approx((5 - 3 * t.ppf(0.975, 1), 5 + 3 * t.ppf(0.975, 1)))


def test_where_images_and_networks_each_occur_once_it_is_student_s_t() -> None:
    values = [31.0, 28.5, 40.2, 33.3, 29.9]
    found = crossed_interval(values, range(5), range(5))
    assert found == pytest.approx(mean_interval(values))


def test_a_table_of_additive_effects_has_the_variance_of_both() -> None:
    rng = np.random.default_rng(0)
    image, network = rng.normal(0, 3, 40), rng.normal(0, 2, 50)
    table = 30 + image[:, None] + network[None]
    rows, columns = np.indices(table.shape)
    found = crossed_interval(
        table.ravel().tolist(), rows.ravel().tolist(), columns.ravel().tolist()
    )
    assert found is not None
    low, high = found
    error = (high - low) / 2 / t.ppf(0.975, 39)
    expected = math.sqrt(image.var(ddof=1) / 40 + network.var(ddof=1) / 50)
    assert error == pytest.approx(expected, rel=0.02)


def test_values_that_share_a_network_are_no_further_evidence() -> None:
    values = [30.0, 30.1, 40.0, 40.1] * 4
    shared = crossed_interval(values, range(16), [0, 0, 1, 1] * 4)
    alone = crossed_interval(values, range(16), range(16))
    assert shared is not None and alone is not None
    assert shared[1] - shared[0] > 5 * (alone[1] - alone[0])


def test_one_network_shows_no_spread_over_networks_and_equal_values_none() -> None:
    assert crossed_interval([1.0, 2.0], [0, 1], [0, 0]) is None
    assert crossed_interval([], [], []) is None
    assert crossed_interval([2.0, 2.0], [0, 1], [0, 1]) is None


def test_of_one_network_an_interval_is_over_images_and_says_so() -> None:
    values, images = [30.0, 31.0, 40.0, 42.0, 35.0, 36.0], [0, 0, 1, 1, 2, 2]
    found = crossed_interval(values, images, None)
    assert found == pytest.approx(mean_interval(values, groups=images))
    assert columns("psnr", values, images)["interval_over"] == "images, one network"
    assert columns("psnr", values, images, images)["interval_over"] == "images and networks"


def test_an_interval_ends_at_the_cap() -> None:
    found = crossed_interval([100.0, 100.0, 70.0], range(3), range(3), bounds=(0.0, 100.0))
    assert found is not None and found[1] == 100.0


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.2, 0.3, 0.0], "alike"),
        ([-9.0, -8.5, -9.5, -9.2], "apart"),
        ([-9.0, 8.5, -9.5, 9.2], "open"),
        ([0.0, 0.0, 0.0, 0.0], "alike"),
    ],
)
def test_equivalence_needs_the_whole_interval_within_the_margin(
    differences: list[float], verdict: str
) -> None:
    assert equivalence(differences, range(4), range(4)) == verdict


def test_a_single_pair_decides_nothing() -> None:
    assert equivalence([0.0], [0], [0]) == "open"


@pytest.mark.parametrize(
    ("by", "verdict"), [(2.0, "gains"), (-2.0, "loses"), (0.0, "reference"), (None, "open")]
)
def test_a_gain_is_an_interval_above_zero(by: float | None, verdict: str) -> None:
    reference = [10.0, 14.0, 12.0, 15.0]
    moved = [by + e for e in (0.0, 0.01, -0.01, 0.0)] if by else [1.0, -1.0, 1.0, -1.0]
    own = reference if by == 0.0 else [r + m for r, m in zip(reference, moved, strict=True)]
    row = {"psnr_each": own, "sources_each": range(4), "networks_each": range(4)}
    found = gain_over(reference, row)
    assert found["verdict"] == verdict
    assert found["gain"] == pytest.approx(by or 0.0)
