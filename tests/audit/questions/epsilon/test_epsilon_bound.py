"""Bounds on epsilon against brute force, published figures and simulated mechanisms."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from bract.audit.questions.epsilon.bound import (
    Guesses,
    best_bound,
    chance_of_guesses,
    epsilon_bound,
    gaussian_bound,
    guesses,
    one_shot_estimate,
)
from bract.audit.questions.epsilon.gaussian import gaussian_delta, gaussian_epsilon
from experiments.epsilon import gaussian_mu


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("right", range(6))
def test_without_delta_it_is_the_tail_of_randomised_response(epsilon: float, right: int) -> None:
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    brute = sum(
        math.prod(rate if hit else 1 - rate for hit in hits)
        for hits in itertools.product((0, 1), repeat=5)
        if sum(hits) >= right
    )
    assert chance_of_guesses(Guesses(5, 5, right), epsilon, 0.0) == pytest.approx(brute)


@pytest.mark.parametrize("found", [Guesses(40, 20, 17), Guesses(9, 9, 9), Guesses(30, 8, 1)])
def test_delta_adds_the_largest_mean_of_the_probabilities_just_below(found: Guesses) -> None:
    epsilon, delta = 0.7, 1e-3
    rate = 1 / (1 + math.exp(-epsilon))
    tail = sum(binom.pmf(k, found.made, rate) for k in range(found.right, found.made + 1))
    alpha = max(
        sum(binom.pmf(k, found.made, rate) for k in range(found.right - i, found.right)) / i
        for i in range(1, found.canaries + 1)
    )
    expected = min(1.0, tail + 2 * found.canaries * delta * alpha)
    assert chance_of_guesses(found, epsilon, delta) == pytest.approx(expected)


def test_only_right_guesses_bound_epsilon_as_by_hand() -> None:
    # r right of r: e^eps / (1 + e^eps) = 0.05 ** (1 / r).
    rate = 0.05 ** (1 / 20)
    assert epsilon_bound(Guesses(20, 20, 20), 0.0) == pytest.approx(math.log(rate / (1 - rate)))
    assert epsilon_bound(Guesses(20, 20, 10), 0.0) == 0.0


def test_the_bound_is_above_randomised_response_in_one_audit_of_twenty() -> None:
    generator = np.random.default_rng(0)
    epsilon, above = 1.5, 0
    for _ in range(150):
        included = generator.random(200) < 0.5
        kept = generator.random(200) < 1 / (1 + math.exp(-epsilon))
        scores = np.where(included == kept, 1.0, -1.0) + 1e-3 * generator.random(200)
        above += epsilon_bound(guesses(scores, included, 1.0), 0.0) > epsilon
    assert above <= binom.isf(0.001, 150, 0.05)


def test_guesses_are_the_highest_and_the_lowest_scores() -> None:
    scores = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 0.0])
    included = np.array([True, True, True, False, False, False])
    assert guesses(scores, included, 1.0) == Guesses(6, 6, 4)
    assert guesses(scores, included, 1 / 3) == Guesses(6, 2, 2)


def test_scores_that_say_nothing_give_no_bound() -> None:
    generator = np.random.default_rng(1)
    included = generator.random(500) < 0.5
    assert best_bound([generator.random(500)], included, 1e-5).epsilon < 0.3


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_gaussian_epsilon_inverts_the_integral_of_the_densities(mu: float) -> None:
    delta = 1e-5
    epsilon = gaussian_epsilon(mu, delta)
    grid = np.linspace(-20, 20 + mu, 400_001)
    gap = norm.pdf(grid, mu) - np.exp(epsilon) * norm.pdf(grid)
    assert float(np.clip(gap, 0, None).sum() * (grid[1] - grid[0])) == pytest.approx(delta, 1e-3)
    assert gaussian_mu(epsilon, delta) == pytest.approx(mu, 1e-6)
    assert gaussian_delta(epsilon, mu) == pytest.approx(delta, 1e-6)


@pytest.mark.parametrize("mu", [1e3, 1e5, 1e7])
def test_gaussian_epsilon_holds_for_noise_that_hides_nothing(mu: float) -> None:
    # Where mu is large, e^epsilon Phi(b) is at most phi(a) / |b|, so that delta is Phi(a) but for a
    # share of order 1 / mu, and epsilon = mu^2 / 2 + mu Phi^-1(1 - delta).
    delta = 1e-5
    slope = (gaussian_epsilon(mu, delta) - mu * mu / 2) / mu
    assert slope == pytest.approx(norm.isf(delta), abs=2 / mu + 1e-4)


def test_gaussian_delta_is_balle_and_wang_s_formula_in_sixty_digits() -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        for epsilon, mu in ((0.1, 0.5), (3.0, 1.0), (91.8, 10.0), (5425.5, 100.0), (5e13, 1e7)):
            above, below = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
            exact = mpmath.ncdf(above) - mpmath.exp(epsilon) * mpmath.ncdf(below)
            assert gaussian_delta(epsilon, mu) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_white_box_canaries_measure_much_of_a_gaussian_s_epsilon(epsilon: float) -> None:
    generator = np.random.default_rng(4)
    delta, mu = 1e-5, gaussian_mu(epsilon, 1e-5)
    included = generator.random(20_000) < 0.5
    scores = np.where(included, mu / 2, -mu / 2) + generator.normal(size=len(included))
    free = best_bound([scores], included, delta).epsilon
    claimed = gaussian_bound(scores, included, delta)
    assert 0.4 * epsilon < free < epsilon
    assert 0.75 * epsilon < claimed < epsilon
    estimate = one_shot_estimate(scores[included], scores[~included], delta)
    assert estimate == pytest.approx(epsilon, rel=0.15)


def test_equal_distributions_have_no_epsilon() -> None:
    same = np.random.default_rng(3).normal(size=5000)
    assert one_shot_estimate(same, same, 1e-5) == 0.0


def test_the_one_shot_estimate_is_as_often_above_epsilon_as_below() -> None:
    generator = np.random.default_rng(6)
    delta, mu = 1e-5, gaussian_mu(4.0, 1e-5)
    shares = []
    for _ in range(100):
        included = generator.random(2000) < 0.5
        scores = np.where(included, mu / 2, -mu / 2) + generator.normal(size=2000)
        shares.append(one_shot_estimate(scores[included], scores[~included], delta) / 4.0)
    assert binom.isf(0.999, 100, 0.5) <= sum(s > 1.0 for s in shares) <= binom.isf(0.001, 100, 0.5)
    assert float(np.mean(shares)) == pytest.approx(1.0, abs=0.03)


def test_no_epsilon_and_no_distance_is_found_where_there_is_none() -> None:
    assert gaussian_epsilon(1.0, 0.0) == math.inf
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert math.isnan(gaussian_epsilon(math.nan, 1e-5))
    assert gaussian_mu(1.0, 1.0) == math.inf
    assert gaussian_mu(math.inf, 1e-5) == math.inf
