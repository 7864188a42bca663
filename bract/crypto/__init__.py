"""Primitives of cryptography: secret random numbers, public keys."""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
