"""Numbers that state a protection, by the names under which replies and libraries give them."""

from __future__ import annotations

import re
from typing import Literal

ClaimKind = Literal["epsilon", "delta", "noise_multiplier", "noise_std", "clip"]

_EXACT: dict[str, ClaimKind] = {
    "epsilon": "epsilon",
    "eps": "epsilon",
    "delta": "delta",
    "noise_multiplier": "noise_multiplier",
    "sigma": "noise_multiplier",
    "noise_std": "noise_std",
    "noise_stddev": "noise_std",
    "noise_stdev": "noise_std",
    "noise_scale": "noise_std",
    "std_dev": "noise_std",
    "max_grad_norm": "clip",
    "clipping_norm": "clip",
    "clip_norm": "clip",
    "clipping_threshold": "clip",
}

_QUALIFIERS = frozenset(
    {"dp", "privacy", "private", "target", "current", "spent", "total", "final", "ldp", "local"}
    | {"opacus", "client", "max"}
)
"""Words that may precede a name; any other, such as ``adam_epsilon``, is no claim."""


def claim_of(name: str) -> ClaimKind | None:
    """Return what a number of that name states; None where it states no protection.

    Examples
    --------
    >>> claim_of("dp/target_epsilon"), claim_of("adam_eps")
    ('epsilon', None)
    """
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w]
    for start in range(len(words)):
        known = _EXACT.get("_".join(words[start:]))
        if known is not None and set(words[:start]) <= _QUALIFIERS:
            return known
    return None
