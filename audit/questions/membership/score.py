"""How well scores tell members from non-members, with intervals, power, and what chance does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bract.audit.questions.membership.rates import needed

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

POWER = 0.8
"""Share of audits in which `detectable` effects show."""

DRAWS = 1999
"""Permutations behind `permuted_chance`."""


def auc(members: Array, others: Array) -> float:
    """Return the probability that a member's score is above a non-member's, ties by half."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))
    count = len(members)
    above = ranks[:count].sum() - count * (count + 1) / 2
    return float(above / (count * len(others)))


def auc_interval(members: Array, others: Array, level: float = 0.95) -> tuple[float, float]:
    """Return DeLong's interval (DeLong, DeLong and Clarke-Pearson 1988) on the logit scale.

    Where the curve is perfect no variance is seen. Then the limit is the exact one of
    min(m, n) independent pairs that all have one order: ``(1 - level)/2`` to the power of its
    inverse.
    """
    from scipy.stats import norm

    value = auc(members, others)
    if value in (0.0, 1.0):
        limit = float(((1.0 - level) / 2) ** (1.0 / min(len(members), len(others))))
        return (limit, 1.0) if value else (0.0, 1.0 - limit)
    of_members = np.array([auc(members[i : i + 1], others) for i in range(len(members))])
    of_others = np.array([auc(members, others[i : i + 1]) for i in range(len(others))])
    variance = _variance(of_members) / len(members) + _variance(of_others) / len(others)
    logit, half = (
        math.log(value / (1.0 - value)),
        float(norm.ppf((1.0 + level) / 2)) * math.sqrt(variance) / (value * (1.0 - value)),
    )
    return _logistic(logit - half), _logistic(logit + half)


def threshold(others: Array, rate: float) -> tuple[float, int] | None:
    """Return the lowest threshold that at most this share of non-members exceeds, and their number.

    None with fewer non-members than `needed`.
    """
    if len(others) < needed(rate):
        return None
    allowed = math.floor(rate * len(others) + 1e-9)
    found = float(np.sort(others)[len(others) - 1 - allowed])
    return found, int((others > found).sum())


def share_limits(count: int, total: int, tail: float) -> tuple[float, float]:
    """Return the limits of Clopper and Pearson, each wrong with probability ``tail`` at most."""
    from scipy.stats import beta

    low = 0.0 if count == 0 else float(beta.ppf(tail, count, total - count + 1))
    high = 1.0 if count == total else float(beta.ppf(1.0 - tail, count + 1, total - count))
    return low, high


def advantage_limit(members: Array, others: Array, rate: float, tail: float) -> float | None:
    """Return a lower limit on true less false positives at the threshold of a rate.

    The threshold is an order statistic of the non-members, so the rate at which others exceed it
    has a beta distribution, whatever theirs is; ``tail`` is shared by the two limits. None with too
    few non-members.
    """
    from scipy.stats import beta

    at = threshold(others, rate)
    if at is None:
        return None
    allowed = math.floor(rate * len(others) + 1e-9)
    false_high = float(beta.ppf(1.0 - tail / 2, allowed + 1, len(others) - allowed))
    low, _ = share_limits(int((members > at[0]).sum()), len(members), tail / 2)
    return low - false_high


def detectable_auc(members: int, others: int, level: float = 0.95) -> float:
    """Return the area under the curve that shows with `POWER`, by the rank test's own variance."""
    from scipy.stats import norm

    error = math.sqrt((members + others + 1) / (12.0 * members * others))
    return min(1.0, 0.5 + float(norm.ppf(level) + norm.ppf(POWER)) * error)


def detectable_advantage(members: int, rate: float, level: float = 0.95) -> float:
    """Return true less false positives at a rate that show with `POWER`, the rate being exact.

    It shows where the lower limit of the true positives is above the rate.
    """
    from scipy.stats import beta, binom

    # The fewest true positives of which less likely ones than 1 - level would be chance.
    least = int(binom.isf(1.0 - level, members, rate)) + 1
    if least > members:
        return 1.0 - rate
    share = float(beta.ppf(POWER, least, members - least + 1))
    return share - rate


def permuted_chance(
    scores: Sequence[Array], members: Flags, rates: Sequence[float], *, seed: int
) -> float:
    """Return how likely attackers that see nothing do as well as the best of these.

    Who is a member is permuted; the statistics are the largest area under the curve over all
    attackers, and the largest standardised number of true positives over attackers and rates. The
    smaller of the two probabilities is doubled. Exact for any dependence among attackers, where
    members and non-members were drawn alike.

    Parameters
    ----------
    scores
        One ``(N,)`` an attacker.
    members
        bool ``(N,)``.
    rates
        Those that have enough non-members.
    """
    from scipy.stats import rankdata

    generator = np.random.default_rng(seed)
    labels = np.stack([members, *(generator.permutation(members) for _ in range(DRAWS))])
    count, rest = int(members.sum()), int((~members).sum())
    best_area = np.full(len(labels), -np.inf)
    best_found = np.full(len(labels), -np.inf)
    for one in scores:
        ranks = rankdata(one)
        best_area = np.maximum(best_area, labels @ ranks)
        # Ties are put in an order that does not depend on who is a member.
        order = np.lexsort((generator.random(len(one)), -one))
        sorted_labels = labels[:, order]
        passed = np.cumsum(~sorted_labels, axis=1)
        for rate in rates:
            allowed = math.floor(rate * rest + 1e-9)
            found = (sorted_labels & (passed <= allowed)).sum(axis=1)
            error = math.sqrt(count * rate * (1.0 - rate))
            best_found = np.maximum(best_found, (found - count * rate) / error)
    chances = [_chance(best_area)] + ([_chance(best_found)] if rates else [])
    return min(1.0, len(chances) * min(chances))


def _chance(statistics: Array) -> float:
    """Return the share of draws at least as large as the first, itself included."""
    return float((statistics >= statistics[0] - 1e-9).mean())


def _variance(values: Array) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def _logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value > -700 else 0.0
