"""Public integer weights that represent real shares."""

from collections.abc import Callable, Sequence

import numpy as np

from bract.paillier.errors import CapacityError, PaillierError


def allows(weight: int, total: int, most: float) -> bool:
    """Return whether a weight of a sum is a share of at most ``most``, to float precision."""
    return weight <= most * total * (1 + 1e-9)


def integer_weights(
    shares: Sequence[float],
    max_sum: int,
    *,
    most: float = 1.0,
    allowed: Callable[[Sequence[int]], bool] | None = None,
) -> list[int]:
    """Return the integers whose proportions come closest to ``shares``.

    A ciphertext can only be multiplied by integers, and their true sum divides the result, so
    three equal shares become ``[1, 1, 1]`` and lose nothing. Every sum up to ``max_sum`` is tried;
    the smallest largest error of a share wins, and then the smallest sum, which needs the fewest
    guard bits. No positive share becomes zero: no client is dropped by rounding.

    Args:
        shares: Non-negative real shares, in any scale.
        max_sum: Largest allowed sum, :attr:`Layout.max_weight`.
        most: Largest share of one client, at least that of equal weights; no rounding exceeds it,
            so clients that know the weights alone can check it.
        allowed: Whether clients take such weights, None for any; equal ones must be.

    Raises:
        PaillierError: No shares, a negative or non-finite one, or all zero.
        CapacityError: More positive shares than ``max_sum``.
    """
    real = np.asarray(shares, dtype=np.float64)
    if real.ndim != 1 or not real.size or not np.isfinite(real).all() or real.min() < 0:
        raise PaillierError(f"shares must be finite and non-negative, found {list(shares)}")
    if real.sum() == 0:
        raise PaillierError("all shares are zero: nothing to average")
    real = real / real.sum()
    positive = np.count_nonzero(real)
    if positive > max_sum:
        raise CapacityError(
            f"{positive} clients with a positive share need weights of a sum of at least "
            f"{positive}, but the layout allows {max_sum}: plan it with a larger max_weight"
        )
    best: tuple[float, int, list[int]] | None = None
    for scale in range(1, max_sum + 1):
        weights = np.where(real > 0, np.maximum(np.rint(real * scale), 1), 0)
        total = int(weights.sum())
        if total > max_sum or not allows(int(weights.max()), total, most):
            continue
        if allowed is not None and not allowed([int(w) for w in weights if w]):
            continue
        error = round(float(np.abs(weights / total - real).max()), 12)
        if best is None or (error, total) < best[:2]:
            best = error, total, [int(w) for w in weights]
            if error == 0:
                break
    assert best is not None
    return best[2]
