"""Fixed-point codes for real values, offset so that a code is never negative."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bract.paillier.errors import PaillierError


@dataclass(frozen=True)
class FixedPoint:
    """Symmetric fixed point: ``code = round(value / step) + levels``, ``0 <= code <= 2 levels``.

    A sum of codes never borrows from its neighbour's slot, because no code is negative. Zero is
    exact. With ``W`` the sum of integer weights, a weighted sum of codes is between 0 and
    ``2 levels W``, and its weighted mean differs from the mean of the values by at most ``bound``.

    Attributes:
        clip: Largest magnitude that is kept; values beyond it become ``+-clip``.
        bits: Size of a code, 2 to 32.
    """

    clip: float
    bits: int = 16

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise PaillierError(f"the clip range must be positive and finite, found {self.clip}")
        if not 2 <= self.bits <= 32:
            raise PaillierError(f"a code has 2 to 32 bits, found {self.bits}")

    @property
    def levels(self) -> int:
        """Number of steps between zero and ``clip``: ``2^(bits-1) - 1``."""
        return (1 << (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """Distance of two neighbouring codes, in the values' unit."""
        return self.clip / self.levels

    @property
    def bound(self) -> float:
        """Largest error of a mean of values inside the clip range: half a step.

        The part beyond one half covers the rounding of 64-bit floats at 32 bits.
        """
        return self.step * (0.5 + 1e-5)

    def encode(self, values: ArrayLike) -> tuple[NDArray[np.uint64], int]:
        """Turn values into codes.

        Args:
            values: Real numbers of any shape, flattened.

        Returns:
            Codes of shape ``(n,)``, and the number of values outside the clip range.

        Raises:
            PaillierError: NaN or infinity among the values.
        """
        real = np.asarray(values, dtype=np.float64).ravel()
        if not np.isfinite(real).all():
            bad = np.flatnonzero(~np.isfinite(real))
            raise PaillierError(
                f"{bad.size} of {real.size} values are NaN or infinite, the first at "
                f"{bad[0]} ({real[bad[0]]}): they cannot be encrypted; has the training diverged?"
            )
        clipped = int(np.count_nonzero(np.abs(real) > self.clip))
        scaled = np.rint(np.clip(real, -self.clip, self.clip) / self.clip * self.levels)
        return (scaled + self.levels).astype(np.uint64), clipped

    def decode(self, sums: NDArray[np.uint64], weight: int) -> NDArray[np.float64]:
        """Return the weighted mean of values from the weighted sum of their codes.

        Args:
            sums: Sums of weight times code.
            weight: Sum of the integer weights.
        """
        centred = sums.astype(np.int64) - weight * self.levels
        return np.asarray(centred * (self.step / weight), dtype=np.float64)
