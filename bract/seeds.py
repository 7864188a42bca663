"""Every random draw of a federation derives from one seed and says what it is for."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**31) that depends on ``seed`` and on every part of ``purpose``."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
