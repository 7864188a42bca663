"""Every random draw of a federation derives from one seed and a name of its purpose."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**31) that depends on ``seed`` and on every part of ``purpose``."""
    return int.from_bytes(_digest(seed, *purpose)[:4], "big") >> 1


def trial_seed(seed: int, observation: str, restart: int) -> int:
    """Return the seed, in [0, 2**48), of one restart on one observation, by the latter's key.

    It depends on nothing else, so a result does not depend on what ran at the same time.
    """
    return int.from_bytes(_digest(seed, observation, restart)[:6], "big")


def _digest(*parts: str | int) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
