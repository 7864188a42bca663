"""Areas, rates, intervals and chances against hand-worked answers, libraries and simulation."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from bract.audit.questions.membership.blind import UNFAIR, blind_score
from bract.audit.questions.membership.rates import found_among, needed
from bract.audit.questions.membership.score import (
    advantage_limit,
    auc,
    auc_interval,
    detectable_advantage,
    detectable_auc,
    permuted_chance,
    share_limits,
    threshold,
)


def test_the_area_is_the_share_of_ordered_pairs() -> None:
    members, others = np.array([3.0, 1.0, 2.0]), np.array([0.0, 2.0])
    pairs = [(m > o) + 0.5 * (m == o) for m, o in itertools.product(members, others)]
    assert auc(members, others) == pytest.approx(np.mean(pairs))
    labels = [1, 1, 1, 0, 0]
    expected = roc_auc_score(labels, np.concatenate([members, others]))
    assert auc(members, others) == pytest.approx(expected)


def test_delong_s_interval_covers_the_true_area() -> None:
    generator = np.random.default_rng(0)
    true, covered = 0.7602499389065233, 0  # Phi(1 / sqrt(2))
    for _ in range(200):
        low, high = auc_interval(generator.normal(1, 1, 40), generator.normal(0, 1, 30))
        covered += low <= true <= high
    assert covered >= 180


def test_a_perfect_curve_has_the_limit_of_independent_pairs() -> None:
    low, high = auc_interval(np.arange(10.0, 30.0), np.arange(5.0))
    assert high == 1.0 and low == pytest.approx(0.025 ** (1 / 5))
    assert auc_interval(np.arange(5.0), np.arange(10.0, 30.0)) == pytest.approx((0.0, 1 - low))


@pytest.mark.parametrize(("rate", "count"), [(0.001, 1000), (0.01, 100), (0.05, 20)])
def test_a_rate_needs_one_non_member_to_be_it(rate: float, count: int) -> None:
    assert needed(rate) == count
    assert threshold(np.arange(count - 1.0), rate) is None
    assert threshold(np.arange(float(count)), rate) == (count - 2.0, 1)


def test_shares_have_clopper_and_pearson_s_limits() -> None:
    found = binomtest(7, 20).proportion_ci(0.95, method="exact")
    assert share_limits(7, 20, 0.025) == pytest.approx((found.low, found.high))
    assert share_limits(0, 5, 0.025)[0] == 0.0 and share_limits(5, 5, 0.025)[1] == 1.0


def test_the_limit_on_an_advantage_is_seldom_above_it() -> None:
    generator = np.random.default_rng(1)
    null = [
        advantage_limit(generator.normal(size=60), generator.normal(size=60), 0.05, 0.05)
        for _ in range(300)
    ]
    assert sum(value is not None and value > 0.0 for value in null) <= 20
    clear = advantage_limit(generator.normal(8, 1, 60), generator.normal(size=200), 0.05, 0.05)
    assert clear is not None and clear > 0.7


def test_power_falls_with_the_number_of_candidates() -> None:
    assert detectable_auc(50, 50) == pytest.approx(0.644, abs=1e-3)
    assert detectable_auc(1000, 1000) < 0.54
    assert detectable_advantage(1000, 0.01) < 0.02 < detectable_advantage(50, 0.01)
    # Of 2 members the chance of both above 5 % is 0.0025: both must be, in 80 % of audits.
    assert detectable_advantage(2, 0.05) == pytest.approx(0.8**0.5 - 0.05, abs=0.3)


def test_the_permuted_chance_is_uniform_where_nothing_leaks() -> None:
    generator = np.random.default_rng(2)
    members = np.arange(80) < 40
    chances = []
    for number in range(100):
        one = generator.normal(size=80)
        chances.append(
            permuted_chance([one, one + generator.normal(size=80)], members, [0.05], seed=number)
        )
    assert np.mean(np.array(chances) <= 0.05) <= 0.12
    assert 0.3 < np.mean(chances) < 0.8
    leak = generator.normal(size=80) + 1.5 * members
    assert permuted_chance([generator.normal(size=80), leak], members, [0.05], seed=0) < 0.01


def test_holm_s_procedure_takes_clients_one_after_another() -> None:
    assert found_among({"a": 0.02, "b": 0.2}, 0.95) == {"a"}
    assert found_among({"a": 0.02, "b": 0.04}, 0.95) == {"a", "b"}
    assert found_among({"a": 0.03, "b": 0.04}, 0.95) == set()


def test_a_blind_classifier_recognises_candidates_that_were_drawn_differently() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(120, 1, 8, 8, generator=generator)
    labels = torch.arange(120) % 10
    members = np.arange(120) < 60
    fair = blind_score(images, labels, members, seed=0)
    assert fair.chance > UNFAIR and abs(fair.auc - 0.5) < 0.2
    images[:60] *= 0.8
    unfair = blind_score(images, labels, members, seed=0)
    assert unfair.chance < UNFAIR and unfair.auc > 0.75
