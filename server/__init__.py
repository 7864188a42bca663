"""The server: the app and the capture hook.

The names in its stub are imported when they are first used: this package alone loads neither torch
nor Flower.
"""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
