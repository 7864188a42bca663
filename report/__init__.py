"""The one-page leakage report; the names in its stub are imported when they are first used."""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
