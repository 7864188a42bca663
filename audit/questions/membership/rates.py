"""Rates of false positives, and which clients are no chance."""

from __future__ import annotations

import math
from collections.abc import Mapping

RATES = (0.001, 0.01, 0.05)
"""Rates of false positives."""

CLASS = "class"
"""Attribute whose groups are the classes."""


def needed(rate: float) -> int:
    """Return how many non-members a rate of false positives needs: one of them is the rate."""
    return math.ceil(round(1.0 / rate, 6))


def found_among(chances: Mapping[str, float], level: float) -> set[str]:
    """Return which clients are no chance, by Holm's procedure over all of them."""
    found = set()
    ordered = sorted(chances.items(), key=lambda item: item[1])
    for position, (client, chance) in enumerate(ordered):
        if chance > (1.0 - level) / (len(ordered) - position):
            break
        found.add(client)
    return found
