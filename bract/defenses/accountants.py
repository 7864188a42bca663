"""Opacus' accountants, bounded in time and memory, and never below what was spent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

Accountant = Literal["rdp", "prv"]

Use = tuple[float, float, int]
"""Noise multiplier, sampling rate and number of steps."""

MOST_POINTS = 1 << 21
"""Points that the PRV accountant may compute with: about 160 bytes and 4 microseconds each. Their
number grows with epsilon, so with small noise, and with the root of the number of steps."""

_ERROR = 0.01
"""By how much PRV's epsilon may be too large; Opacus' default."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spent:
    """An epsilon, and how it was found.

    Attributes
    ----------
    epsilon
        Never NaN; infinite where no accountant gives a bound.
    note
        Why it is not the figure of the accountant that was asked for; empty where it is.
    """

    epsilon: float
    note: str = ""


def spent_by(uses: Sequence[Use], delta: float, accountant: Accountant = "rdp") -> Spent:
    """Return what uses of subsampled Gaussian noise spend together, by an accountant of Opacus.

    PRV is replaced by RDP, whose epsilon is a bound too and larger, where it would need more than
    `MOST_POINTS` points.
    """
    return _spent_by(tuple(uses), delta, accountant)


@lru_cache(maxsize=64)
def _spent_by(uses: tuple[Use, ...], delta: float, accountant: Accountant) -> Spent:
    if not uses:
        return Spent(0.0)
    if accountant == "rdp":
        return Spent(_epsilon(uses, delta, "rdp"))
    points = prv_points(uses, delta)
    if points <= MOST_POINTS:
        return Spent(_epsilon(uses, delta, "prv"))
    note = (
        f"by Opacus' RDP accountant, a larger bound: PRV would need {points:.2g} points for this "
        f"noise, of {MOST_POINTS:.2g} at most"
    )
    _log.warning("epsilon is computed %s", note)
    return Spent(_epsilon(uses, delta, "rdp"), note)


def prv_points(uses: Sequence[Use], delta: float) -> float:
    """Return how many points Opacus' PRV accountant would compute with; infinite if any number."""
    from opacus.accountants.analysis import prv

    delta_error = delta / 1000
    steps = sum(count for *_, count in uses)

    def size() -> float:
        return float(
            prv.compute_safe_domain_size(
                prvs=[prv.PoissonSubsampledGaussianPRV(rate, noise) for noise, rate, _ in uses],
                max_self_compositions=[count for *_, count in uses],
                eps_error=_ERROR,
                delta_error=delta_error,
            )
        )

    mesh = _ERROR / math.sqrt(steps * math.log(12 / delta_error) / 2)
    return len(uses) * 2 * _at_least(size) / mesh


def smallest_noise(epsilon: float, delta: float, rate: float, steps: int) -> float | None:
    """Return the smallest noise multiplier for an epsilon by PRV, to within 0.01; None for none.

    It is between that by RDP and half of it. Noise at which PRV would need more than `MOST_POINTS`
    points is counted by RDP, as `spent_by` counts it when it is spent.
    """

    def of(noise: float, accountant: Accountant) -> float:
        return spent_by([(noise, rate, steps)], delta, accountant).epsilon

    high = 1.0
    while of(high, "rdp") > epsilon:
        high *= 2.0
        if high > 1e6:
            return None
    low = high / 2.0
    while low > 1e-6 and of(low, "rdp") <= epsilon:
        low /= 2.0
    high = _narrowed(partial(of, accountant="rdp"), epsilon, low, 2.0 * low)
    if prv_points([(high, rate, steps)], delta) > MOST_POINTS:
        return high
    return _narrowed(partial(of, accountant="prv"), epsilon, high / 2.0, high)


def _narrowed(of: Callable[[float], float], epsilon: float, low: float, high: float) -> float:
    """Return noise between two, the larger of which spends at most ``epsilon``."""
    found = of(high)
    while epsilon - found > _ERROR and high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        if (spent := of(middle)) <= epsilon:
            high, found = middle, spent
        else:
            low = middle
    return high


def _epsilon(uses: Sequence[Use], delta: float, accountant: Accountant) -> float:
    from opacus.accountants import create_accountant

    counting = create_accountant(accountant)
    counting.history = list(uses)
    return _at_least(lambda: float(counting.get_epsilon(delta)))


def _at_least(compute: Callable[[], float]) -> float:
    """Return a bound, infinite where arithmetic fails: a NaN would pass any limit."""
    try:
        found = compute()
    except (ArithmeticError, ValueError, RuntimeError):
        return math.inf
    return math.inf if math.isnan(found) else max(0.0, found)
