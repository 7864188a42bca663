"""How far a client's steps of SGD with momentum lead, for any number that a client may declare."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import numpy as np

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


@lru_cache(maxsize=64)
def response(momentum: float, pull: float, steps: int) -> tuple[float, float]:
    """Return how far steps under a constant gradient lead that are pulled back to their start.

    They are ``u_k = momentum u_{k-1} + 1 - pull s_k`` and ``s_{k+1} = s_k + u_k`` from ``s_0 = 0``,
    as SGD's with a proximal term or weight decay, with s in units of the gradient times the rate.
    What each gradient adds to the end, times the place where it is taken, sums to minus the
    derivative of ``s_K`` by the pull; both are of a linear recursion, a power of its matrix.

    Parameters
    ----------
    momentum
        In [0, 1).
    pull
        Learning rate times what pulls, in ``[0, 2 (1 + momentum))``, beyond which steps diverge.
    steps
        At least 1. It may come from a capture, so it bounds neither a list nor a loop.

    Returns
    -------
    tuple
        The mean step ``s_K / K``, and the mean place at which a gradient is taken, at the start of
        its step, as a share of the way, each weighted by what it adds to the end. Steps that
        overshoot have weights of both signs; a mean place outside of [0, 1] is taken for the end.
        Near the bound of pull a few steps may end at their start or behind it, at a mean step of 0
        or less.
    """
    m, p = momentum, pull
    recursion = np.array(
        [  # 1, s, u, and the derivatives of s and u
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [1.0, 1.0 - p, m, 0.0, 0.0],
            [1.0, -p, m, 0.0, 0.0],
            [0.0, -1.0, 0.0, 1.0 - p, m],
            [0.0, -1.0, 0.0, -p, m],
        ]
    )
    _, end, _, slope, _ = np.linalg.matrix_power(recursion, steps)[:, 0]
    if not end > 0.0:
        return float(end) / steps, 1.0
    place = float(-slope / end**2)
    return float(end) / steps, place if 0.0 <= place <= 1.0 else 1.0


def root_of_squares(momentum: float, steps: int) -> float:
    """Return the root of the summed squares of the velocities.

    It is the deviation of the sum of the steps' noise: what step k draws is in the velocities of
    all later steps.
    """
    each = velocities(momentum, steps)
    return math.sqrt(sum(v * v for v in each) + (steps - len(each)) * each[-1] ** 2)
