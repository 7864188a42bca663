"""Weight of each client's claimed number of examples in a round's mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

SMALLEST_SUM = 1.25
"""As how many clients every masked sum counts at least: then the others' part of it is at least
half as long as any one client's, where updates are equally long and at right angles."""


def example_shares(examples: Sequence[int], max_share: float = 1.0) -> list[float]:
    """Return p_i by number of examples, of which there is at least one; they sum to 1.

    Parameters
    ----------
    max_share
        Largest share of one client among three or more, in (0, 1]; see `capped`.
    """
    total = sum(examples)
    shares = [count / total for count in examples]
    return capped(shares, max_share) if len(shares) > 2 else shares


def largest_share(clients: int, most: float) -> float:
    """Return the largest share that one of so many clients may have, at least 1/N."""
    return max(most, 1.0 / clients)


def capped(shares: Sequence[float], most: float) -> list[float]:
    """Return shares of at most ``most`` (at least 1/N) that sum to 1.

    What is cut off one goes to the others, in proportion to their shares.

    Parameters
    ----------
    shares
        Positive numbers that sum to 1.
    """
    most = largest_share(len(shares), most)
    cut: set[int] = set()
    while True:
        rest = sum(share for i, share in enumerate(shares) if i not in cut)
        left = 1.0 - most * len(cut)
        given = [most if i in cut else share * left / rest for i, share in enumerate(shares)]
        over = {i for i, share in enumerate(given) if share > most * (1 + 1e-12)}
        if not over or len(cut | over) == len(shares):
            return given
        cut |= over


def counted(weights: Sequence[int]) -> Fraction:
    """Return as how many clients a weighted sum of updates counts, from 1 to their number.

    It is ``sum w^2 / max w^2``, the stable rank of the diagonal matrix of the weights (Rudelson and
    Vershynin 2007). Of equally long updates at right angles, the sum has the cosine
    ``1 / sqrt(counted)`` with the heaviest one. Kish's effective number, ``(sum w)^2 / sum w^2``,
    bounds no cosine: one weight of 0.56 and nine of 0.05 are 3 by it, with a cosine of 0.97.

    Parameters
    ----------
    weights
        At least one that is not zero; those of a difference of sums may be negative.
    """
    return Fraction(sum(w * w for w in weights), max(w * w for w in weights))


def limited(shares: Sequence[float]) -> list[float]:
    """Return shares whose largest is cut so far that a sum counts as `SMALLEST_SUM` clients.

    Parameters
    ----------
    shares
        Positive numbers, in any scale; a single one is kept.
    """
    if len(shares) < 2:
        return list(shares)
    heaviest = max(range(len(shares)), key=shares.__getitem__)
    others = math.hypot(*(share for i, share in enumerate(shares) if i != heaviest))
    most = others / math.sqrt(SMALLEST_SUM - 1.0)
    return [min(share, most) if i == heaviest else share for i, share in enumerate(shares)]


def sufficient_share(clients: int, least: float) -> float:
    """Return the largest share with which a sum of so many clients counts as ``least`` in any case.

    Parameters
    ----------
    clients
        Of the sum, at least ``least``.
    least
        At least 1.
    """
    return 1.0 / (1.0 + math.sqrt((least - 1.0) * (clients - 1.0)))
