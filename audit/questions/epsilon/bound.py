"""Lower bounds on epsilon from guesses about canaries, and upper ones for Gaussian noise.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (NeurIPS 2023): m canaries
are included by independent fair coins, and an auditor guesses r of the coins. Whatever the
mechanism, if it is (epsilon, delta)-differentially private, v right guesses have the probability of
`chance_of_guesses` at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bract.audit.questions.epsilon.gaussian import gaussian_epsilon

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

MOST_EPSILON = 50.0
"""Where the search for a bound ends; 10,000 guesses without an error give less than 9."""

SHARES = (1.0, 0.5, 0.2, 0.05)
"""Shares of the canaries that are guessed. All are tried, each at its part of the level."""

_STEPS = 36


@dataclass(frozen=True)
class Guesses:
    """How many of ``canaries`` coins were guessed, and how many guesses are right."""

    canaries: int
    made: int
    right: int


def chance_of_guesses(found: Guesses, epsilon: float, delta: float) -> float:
    """Return how likely as many right guesses are at most under (epsilon, delta).

    Theorem 5.2 of Steinke et al.: with W binomial of r draws at ``e^epsilon / (1 + e^epsilon)``,
    ``P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i`` for i from 1 to v.
    """
    from scipy.stats import binom

    rate = 1.0 / (1.0 + math.exp(-epsilon))
    chance = float(binom.sf(found.right - 1, found.made, rate))
    if delta > 0.0 and found.right:
        below = binom.pmf(np.arange(found.right - 1, -1, -1), found.made, rate)
        steps = np.arange(1, found.right + 1)
        chance += 2.0 * found.canaries * delta * float((np.cumsum(below) / steps).max())
    return min(1.0, chance)


def epsilon_bound(found: Guesses, delta: float, tail: float = 0.05) -> float:
    """Return the largest epsilon that so many right guesses refute at 1 - ``tail``; 0 if none."""
    low, high = 0.0, MOST_EPSILON
    if chance_of_guesses(found, low, delta) > tail:
        return 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if chance_of_guesses(found, middle, delta) <= tail:
            low = middle
        else:
            high = middle
    return low


def guesses(scores: Array, included: Flags, share: float) -> Guesses:
    """Guess the highest scores to be included and the lowest not to be, a half each.

    Ties are broken by position, which says nothing of the coin.

    Parameters
    ----------
    scores
        float64 ``(m,)``, higher for canaries that look included.
    included
        The coins, bool ``(m,)``.
    share
        Of the canaries that are guessed, in (0, 1]; about the others nothing is said.
    """
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    low, high = order[:half], order[len(order) - half :]
    right = int(included[high].sum() + (~included[low]).sum())
    return Guesses(len(scores), len(low) + len(high), right)


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon, and the guesses that it rests on."""

    epsilon: float
    guesses: Guesses


def best_bound(
    scores: Sequence[Array], included: Flags, delta: float, level: float = 0.95
) -> Bound:
    """Return the highest bound over `SHARES` and several scorings, valid at ``level`` for all.

    Parameters
    ----------
    scores
        Each ``(m,)``; which of them are tried must not depend on the coins.
    """
    tail = (1.0 - level) / (len(scores) * len(SHARES))
    tried = [guesses(one, included, share) for one in scores for share in SHARES]
    bounds = [Bound(epsilon_bound(found, delta, tail), found) for found in tried]
    return max(bounds, key=lambda bound: (bound.epsilon, bound.guesses.right))


def gaussian_bound(scores: Array, included: Flags, delta: float, tail: float = 0.05) -> float:
    """Return a lower bound on epsilon of noise that is claimed to be Gaussian.

    Under Gaussian differential privacy with mu (Dong, Roth and Su 2022; audited as in Nasr et al.
    2023, "Tight auditing of differentially private machine learning", section 4.2), no guess about
    an independent coin is right with more than probability ``Phi(mu / 2)``. A guess is the sign of
    a score, 0 lying half way. Clopper and Pearson's limit on that probability gives mu, and
    `gaussian_epsilon` the epsilon at ``delta``. A larger one than the account's refutes the noise.
    """
    from scipy.stats import beta, norm

    right = int((included == (scores > 0.0)).sum())
    if not right:
        return 0.0
    rate = float(beta.ppf(tail, right, len(scores) - right + 1))
    return gaussian_epsilon(2.0 * float(norm.ppf(rate)), delta) if rate > 0.5 else 0.0


def one_shot_estimate(included: Array, left_out: Array, delta: float) -> float:
    """Return the estimate of Andrew et al. (arXiv 2302.03098, algorithm 1); no bound.

    The two sets of cosines are taken for normal with one spread, as Gaussian noise has it. The
    paper fits a spread to each: at a small delta epsilon follows from the far tails, where the
    wider of two fits always shows more, so that the estimate is too high in nearly every run.

    Parameters
    ----------
    included, left_out
        Cosines of uploads with the directions whose coin fell either way, each at least 2.
    """
    parts = (included, left_out)
    squares = sum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    spread = max(1e-12, math.sqrt(squares / (len(included) + len(left_out) - 2)))
    return gaussian_epsilon(float(included.mean() - left_out.mean()) / spread, delta)
