"""The client: local training, defenses, and what it agrees to send.

The names below are imported when they are first used, so that importing this package, as every
one of its modules does, loads neither torch nor Flower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.client.encrypted_app import EncryptedClientApp
    from bract.client.gate import NO_MEMORY, Gate, IndependentError
    from bract.client.mod import DefenseMod
    from bract.client.truth import keep
    from bract.client.witnessing import witness
    from bract.protocol.codes import REFUSED

__all__ = [
    "NO_MEMORY",
    "REFUSED",
    "DefenseMod",
    "EncryptedClientApp",
    "Gate",
    "IndependentError",
    "keep",
    "witness",
]

_PLACES = {
    "NO_MEMORY": "bract.client.gate",
    "REFUSED": "bract.protocol.codes",
    "DefenseMod": "bract.client.mod",
    "EncryptedClientApp": "bract.client.encrypted_app",
    "Gate": "bract.client.gate",
    "IndependentError": "bract.client.gate",
    "keep": "bract.client.truth",
    "witness": "bract.client.witnessing",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
