"""Intervals of means: known answers, and what they cover by simulation."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from refusals import refused
from scipy.stats import binomtest, t, ttest_1samp

from bract.audit.intervals import mean_interval, share_interval

SIZES = (3, 4, 8, 16, 30)
SAMPLES = 1000
Draw = Callable[[np.random.Generator, Any], Any]


def test_equal_groups_give_students_interval_of_their_means() -> None:
    values = np.random.default_rng(0).normal(size=(5, 7))
    found = mean_interval(values.ravel().tolist(), groups=[i for i in range(5) for _ in range(7)])
    assert found == pytest.approx(ttest_1samp(values.mean(1), 0.0).confidence_interval())
    alone = mean_interval(values[:, 0].tolist(), level=0.9)
    assert alone == pytest.approx(ttest_1samp(values[:, 0], 0.0).confidence_interval(0.9))


def test_the_standard_error_of_unequal_groups_is_the_jackknifes_by_hand() -> None:
    # Groups (1, 3), (2), (6, 6, 6): mean 4; without each 5, 22/5 and 2, whose mean is 3.8.
    values, groups = [1.0, 3.0, 2.0, 6.0, 6.0, 6.0], ["a", "a", "b", "c", "c", "c"]
    error = (2 / 3 * (1.2**2 + 0.6**2 + 1.8**2)) ** 0.5
    half = t.ppf(0.975, 36 / 14 - 1) * error  # sizes 2, 1, 3: 36 / 14 groups in effect
    assert mean_interval(values, groups=groups) == pytest.approx((4 - half, 4 + half))
    assert mean_interval(values, groups=groups, bounds=(0.0, 6.0)) == (0.0, 6.0)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("sizes", [[1, 1], [9, 1], [4, 1], [2, 1, 3], [1] * 9, [3] * 40, [1] * 500])
def test_the_interval_is_as_wide_as_scipys_quantile(sizes: list[int], level: float) -> None:
    freedom = max(1.0, sum(sizes) ** 2 / sum(size**2 for size in sizes) - 1)
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    values = [float(group) for group in groups]
    found, half = (mean_interval(values, groups=groups, level=one) for one in (level, 0.5))
    assert found is not None and half is not None
    ratio = (found[1] - found[0]) / (half[1] - half[0])
    assert ratio == pytest.approx(t.ppf((1 + level) / 2, freedom) / t.ppf(0.75, freedom), rel=1e-9)


def test_no_spread_or_a_single_group_gives_no_interval() -> None:
    assert mean_interval([1.0]) is None and share_interval([1.0]) is None
    assert mean_interval([1.0, 2.0], groups=["a", "a"]) is None
    assert mean_interval([100.0] * 16) is None
    with refused("data-empty"):
        mean_interval([])


def test_repeats_of_a_client_do_not_narrow_the_interval() -> None:
    values = [0.0, 1.0, 0.4, 0.9]
    repeated, groups = [v for v in values for _ in range(5)], [i for i in range(4) for _ in "abcde"]
    for interval in (mean_interval, share_interval):
        alone, together = interval(values), interval(repeated, groups=groups)
        assert alone is not None and together == pytest.approx(alone)


@pytest.mark.parametrize(("hits", "count"), [(4, 4), (0, 3), (5, 8), (29, 30)])
def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(hits: int, count: int) -> None:
    found = share_interval([1.0] * hits + [0.0] * (count - hits))
    exact = binomtest(hits, count).proportion_ci(method="exact")
    assert found == pytest.approx((exact.low, exact.high), abs=0.015)


def normal(rng: np.random.Generator, size: Any) -> Any:
    return rng.normal(30.0, 5.0, size)


def capped(share: float) -> Draw:
    """PSNR of which a share are exact copies."""

    def draw(rng: np.random.Generator, size: Any) -> Any:
        return np.where(rng.random(size) < share, 100.0, normal(rng, size))

    return draw


def ssim_like(a: float, b: float) -> Draw:
    return lambda rng, size: rng.beta(a, b, size)


def coverage(interval: Callable[..., Any], draw: Draw, mean: float, count: int) -> float:
    """Share of samples whose interval holds the mean; none at all does not hold it."""
    rows = draw(np.random.default_rng(count), (SAMPLES, count))
    found = [interval(row) for row in rows]
    return float(np.mean([f is not None and f[0] - 1e-9 <= mean <= f[1] + 1e-9 for f in found]))


# What Student's t really covers, n = 3, 4, 8, 16 and 30 clients: docs/measured/method.md.
# Near normal scores get what is written on them; a share of exact copies that few clients show
# cannot be covered by anything that looks at the values alone.
MEASURED = {
    "normal": (normal, 30.0, (0.95, 0.95, 0.95, 0.95, 0.95)),
    "ssim, beta(8, 2)": (ssim_like(8, 2), 0.8, (0.93, 0.93, 0.94, 0.94, 0.945)),
    "ssim, beta(0.8, 0.8)": (ssim_like(0.8, 0.8), 0.5, (0.915, 0.925, 0.945, 0.95, 0.95)),
    "ssim, beta(2, 0.5)": (ssim_like(2, 0.5), 0.8, (0.87, 0.875, 0.90, 0.93, 0.94)),
    "psnr, half at the cap": (capped(0.5), 65.0, (0.75, 0.87, 0.925, 0.945, 0.95)),
    "psnr, a tenth at the cap": (capped(0.1), 37.0, (0.78, 0.68, 0.58, 0.81, 0.90)),
}


@pytest.mark.parametrize("name", list(MEASURED))
def test_students_interval_covers_what_the_documents_say(name: str) -> None:
    draw, mean, stated = MEASURED[name]
    found = [coverage(mean_interval, draw, mean, n) for n in SIZES]
    assert found == pytest.approx(stated, abs=0.03)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_the_interval_of_a_share_covers_at_every_size(share: float) -> None:
    def draw(rng: np.random.Generator, size: Any) -> Any:
        return (rng.random(size) < share).astype(np.float64)

    interval = lru_cache(lambda row: share_interval(row))

    def of_row(row: Any) -> tuple[float, float] | None:
        return interval(tuple(sorted(row.tolist())))

    assert min(coverage(of_row, draw, share, n) for n in SIZES) >= 0.93


def test_groups_of_very_unequal_sizes_are_covered() -> None:
    # Images of one client share its level; sizes go from 1 to 64.
    rng, held = np.random.default_rng(1), 0
    for _ in range(SAMPLES):
        sizes = 2 ** rng.integers(0, 7, size=8)
        groups = np.repeat(np.arange(8), sizes)
        values = rng.normal(size=8)[groups] + rng.normal(size=len(groups))
        low, high = mean_interval(values.tolist(), groups=groups.tolist()) or (0.0, 0.0)
        held += low <= 0.0 <= high
    assert held / SAMPLES >= 0.93
