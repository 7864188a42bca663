"""Weight of each client's claimed number of examples in a round's mean."""

from __future__ import annotations

from collections.abc import Sequence


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
