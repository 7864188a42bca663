"""Deploy a Flower federation that defends its gradients, and audit what its server can see."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bract")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"
