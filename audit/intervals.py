"""Intervals of means over clients: images, rounds and seeds of one client count as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bract.errors import BractError

_DRAWS = 10_000
"""Weights behind `share_interval`: its ends move by about 0.003 from one set to another."""

_NODES = 100
"""Points of the integral in `_student`."""


def mean_interval(
    values: Sequence[float],
    *,
    groups: Sequence[object] | None = None,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
) -> tuple[float, float] | None:
    """Student's t interval of a mean, over groups.

    The mean is over all values. Its standard error is the jackknife's that leaves out one group at
    a time, and its degrees of freedom are Kish's effective number of groups less one, but at least
    one: ``s / sqrt(k)`` and k - 1 where all k groups are of one size. docs/measured/method.md
    has its coverage by simulation: the level where values are near normal, less where few groups
    are drawn from a very skewed distribution.

    Parameters
    ----------
    values
        At least one, finite.
    groups
        One key a value, of what was drawn independently: the client. Values with one key do not
        count as further evidence. None takes every value for independent.
    level
        Coverage, in (0, 1).
    bounds
        What the mean cannot leave; the interval is cut to it.

    Returns
    -------
    tuple or None
        None for a single group, and where all groups have the same mean: neither shows a spread.
    """
    sums, sizes = _clusters(values, groups)
    count = len(sums)
    if count < 2:
        return None
    mean = float(sums.sum() / sizes.sum())
    without = (sums.sum() - sums) / (sizes.sum() - sizes)
    error = math.sqrt((count - 1) / count * float(np.square(without - without.mean()).sum()))
    effective = float(sizes.sum()) ** 2 / float(np.square(sizes).sum())
    half = _student(level, max(1.0, effective - 1.0)) * error
    if half <= 1e-9 * max(1.0, float(np.abs(sums / sizes).max())):
        return None
    low, high = mean - half, mean + half
    return (low, high) if bounds is None else (max(low, bounds[0]), min(high, bounds[1]))


def share_interval(
    values: Sequence[float], *, groups: Sequence[object] | None = None
) -> tuple[float, float] | None:
    """Interval by 0.95 of a mean of values in [0, 1], which needs no spread to be seen.

    Gaffke's bounds (2005): the quantiles of the mean under weights drawn uniformly from the simplex
    over the groups and one group more, all of 0 for the lower end and of 1 for the upper. For
    values that are 0 or 1 in groups of one size it is the exact interval of Clopper and Pearson,
    so 4 of 4 is 0.40 to 1. Parameters are those of `mean_interval`; None for a single group.
    """
    sums, sizes = _clusters(values, groups)
    count = len(sums)
    if count < 2:
        return None
    drawn = _simplex(count + 1)
    weights, beyond = drawn[:, :count], drawn[:, count] * sizes.mean()
    total = weights @ sizes + beyond
    tail = (1.0 - 0.95) / 2
    low = np.quantile(weights @ sums / total, tail)
    high = np.quantile((weights @ sums + beyond) / total, 1.0 - tail)
    return float(max(low, 0.0)), float(min(high, 1.0))


@lru_cache(maxsize=1)
def _simplex(count: int) -> NDArray[np.float64]:
    """Return `_DRAWS` uniform draws from the simplex over ``count`` groups, not to be changed."""
    return np.random.default_rng(0).dirichlet(np.ones(count), size=_DRAWS)


def _clusters(
    values: Sequence[float], groups: Sequence[object] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sum and the number of the values of each group."""
    if not len(values):
        raise BractError("an interval needs at least one value, found none", code="data-empty")
    array = np.asarray(values, dtype=np.float64)
    if groups is None:
        return array, np.ones(len(array))
    place = {key: i for i, key in enumerate(dict.fromkeys(groups))}
    at = np.array([place[key] for key in groups])
    sums: NDArray[np.float64] = np.bincount(at, weights=array).astype(np.float64)
    return sums, np.bincount(at).astype(np.float64)


@lru_cache
def _student(level: float, freedom: float) -> float:
    """Return the t within which Student's variable of ``freedom`` of 1 or more is with ``level``.

    With ``t = sqrt(freedom) tan(x)`` the density is ``cos(x) ** (freedom - 1)`` on 0 to pi / 2. Its
    integral is concave, so Newton's steps from 0 come to the quantile from below.
    """
    whole = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.pi**0.5 / 2
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    x, step = 0.0, math.inf
    while step > 1e-15 * max(x, 1e-300):
        inner = np.cos(x * (nodes + 1) / 2) ** (freedom - 1)
        step = (level * whole - x / 2 * float(weights @ inner)) / math.cos(x) ** (freedom - 1)
        x += step
    return math.sqrt(freedom) * math.tan(x)
