"""Keep files on the disk of a party: whole, private, changed under a lock."""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
