"""Epsilon and delta of Gaussian noise, exactly: Balle and Wang 2018, in plain Python.

Known answers in sixty digits are in the tests, and Opacus' accountant gives the same.
"""

from __future__ import annotations

import math

_STEPS = 50

_FAR = 20.0
"""From here on ``erfcx`` is its asymptotic series, to 1e-13."""


def erfcx(x: float) -> float:
    """Return ``e^(x^2) erfc(x)``, which does not underflow; for ``x >= 0``.

    Examples
    --------
    >>> round(erfcx(1.0), 12), round(erfcx(1e6) * 1e6 * math.sqrt(math.pi), 12)
    (0.427583576156, 1.0)
    """
    if x < _FAR:
        return math.exp(x * x) * math.erfc(x)
    square = 2.0 * x * x
    series = 1.0 - (1.0 - (3.0 - (15.0 - 105.0 / square) / square) / square) / square
    return series / (x * math.sqrt(math.pi))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return delta of Gaussian noise at epsilon (Balle and Wang 2018, theorem 8).

    ``mu`` is the distance of the two means in standard deviations. With ``a = mu / 2 - epsilon /
    mu`` and ``b = a - mu``, delta is ``Phi(a) - e^epsilon Phi(b)``. As ``b^2 = a^2 + 2 epsilon``,
    the second term is ``e^(-a^2 / 2) erfcx(-b / sqrt(2)) / 2``, which holds at any epsilon: nothing
    overflows, and no two large numbers are subtracted.
    """
    if mu <= 0.0:
        return 0.0
    above = mu / 2 - epsilon / mu
    below = mu / 2 + epsilon / mu
    second = 0.5 * math.exp(-above * above / 2) * erfcx(below / math.sqrt(2.0))
    return max(0.0, 0.5 * math.erfc(-above / math.sqrt(2.0)) - second)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at which Gaussian noise has ``delta``; exact, by bisection.

    Infinite where ``delta`` is 0, which Gaussian noise has at no epsilon, and where ``mu`` is.
    """
    if math.isnan(mu):
        return math.nan
    if mu > 0.0 and (delta <= 0.0 or math.isinf(mu)):
        return math.inf
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, mu) > delta else (low, middle)
    return high
