"""The client: local training, defenses, and what it agrees to send."""

from typing import TYPE_CHECKING, Any

from bract.client.mod import DefenseMod
from bract.client.truth import keep

if TYPE_CHECKING:
    from bract.client.encrypted.client_app import EncryptedClientApp

__all__ = ["DefenseMod", "EncryptedClientApp", "keep"]


def __getattr__(name: str) -> Any:
    if name != "EncryptedClientApp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # gmpy2 and phe are loaded by encrypted runs only.
    from bract.client.encrypted.client_app import EncryptedClientApp

    return EncryptedClientApp
