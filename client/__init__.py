"""The client: local training, defenses, and what it agrees to send."""

from bract.client.encrypted.client_app import EncryptedClientApp
from bract.client.mod import DefenseMod
from bract.client.truth import keep

__all__ = ["DefenseMod", "EncryptedClientApp", "keep"]
