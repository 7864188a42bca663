"""Deploy a Flower federation that defends its updates, and audit what its server can learn.

The names in ``__init__.pyi`` are imported when they are first used, so that ``import bract`` loads
neither torch nor Flower.
"""

from importlib.metadata import PackageNotFoundError, version

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)

try:
    __version__ = version("bract")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"
