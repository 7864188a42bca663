"""The client: local training, defenses, and what it agrees to send."""

from bract.client.mod import DefenseMod

__all__ = ["DefenseMod"]
