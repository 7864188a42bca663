"""Federated strategies: how the server combines updates.

The names in its stub are imported when they are first used: this package alone loads neither torch
nor Flower, and gmpy2 and phe are loaded by encrypted runs only.
"""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
