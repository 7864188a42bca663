"""The client: local training, defenses, and what it agrees to send.

The names in its stub are imported when they are first used, so that importing this package, as
every one of its modules does, loads neither torch nor Flower.
"""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
