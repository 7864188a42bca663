"""How far a client's steps of SGD with momentum lead, for any number that a client may declare."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

LISTED = 10_000
"""Velocities that are summed one by one; each later one counts as the last of these."""


@lru_cache(maxsize=64)
def velocities(momentum: float, steps: int) -> tuple[float, ...]:
    """Return the velocities ``v_k = momentum v_{k-1} + 1`` of the first steps, at most `LISTED`.

    They are those of SGD with momentum under a constant gradient of 1, and near ``1 / (1 -
    momentum)`` after a few times that many steps.

    Parameters
    ----------
    momentum
        In [0, 1).
    steps
        At least 1. It may come from a capture, so it bounds neither a list nor a loop.
    """
    return tuple(accumulate([1.0] * min(steps, LISTED), lambda v, one: momentum * v + one))


def mean_velocity(momentum: float, steps: int) -> float:
    """Return the mean velocity of the steps."""
    each = velocities(momentum, steps)
    return (sum(each) + (steps - len(each)) * each[-1]) / steps


def root_of_squares(momentum: float, steps: int) -> float:
    """Return the root of the summed squares of the velocities.

    It is the deviation of the sum of the steps' noise: what step k draws is in the velocities of
    all later steps.
    """
    each = velocities(momentum, steps)
    return math.sqrt(sum(v * v for v in each) + (steps - len(each)) * each[-1] ** 2)
