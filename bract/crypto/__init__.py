"""Primitives of cryptography: secret random numbers, public keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.crypto.randomness import SecretStream
    from bract.crypto.x25519 import key_problem

__all__ = [
    "SecretStream",
    "key_problem",
]

_PLACES = {
    "SecretStream": "bract.crypto.randomness",
    "key_problem": "bract.crypto.x25519",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
