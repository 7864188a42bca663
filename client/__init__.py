"""The client: local training, defenses, and what it agrees to send."""

from typing import TYPE_CHECKING, Any

from bract.client.app_guard import Guard
from bract.client.gate import NO_MEMORY, Gate, IndependentError
from bract.client.mod import DefenseMod
from bract.client.truth import keep
from bract.client.witnessing import witness
from bract.protocol.codes import REFUSED

if TYPE_CHECKING:
    from bract.client.encrypted_app import EncryptedClientApp

__all__ = [
    "NO_MEMORY",
    "REFUSED",
    "DefenseMod",
    "EncryptedClientApp",
    "Gate",
    "Guard",
    "IndependentError",
    "keep",
    "witness",
]


def __getattr__(name: str) -> Any:
    if name != "EncryptedClientApp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # gmpy2 and phe are loaded by encrypted runs only.
    from bract.client.encrypted_app import EncryptedClientApp

    return EncryptedClientApp
