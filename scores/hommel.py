"""Which of many hypotheses fall together: what stands out from chance in a whole run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def named(chances: Sequence[float], rate: float) -> list[bool]:
    """Return which hypotheses fall with every false one counted: Hommel's procedure (1988).

    The probability that any true one is among them is at most ``rate``, for p-values that are
    independent or positively dependent. It is the closure of Simes' test: all that Holm's procedure
    names and more, where many are small.
    """
    values = np.asarray(chances, dtype=np.float64)
    ordered = np.sort(values)

    def plausible(size: int) -> bool:
        """Say whether the ``size`` largest may all be true."""
        largest = ordered[len(ordered) - size :]
        return bool(np.all(largest > np.arange(1, size + 1) * rate / size))

    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plausible(middle) else (low, middle - 1)
    return [bool(value <= rate / max(low, 1)) for value in values]
