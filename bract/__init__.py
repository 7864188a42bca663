"""Deploy a Flower federation that defends its updates, and audit what its server can learn.

The names below are imported when they are first used, so that ``import bract`` loads neither torch
nor Flower. Type checkers read them in ``__init__.pyi``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from bract.lazy import lazily

_PLACES = {
    "Audit": "bract.audit.audit",
    "DefenseMod": "bract.client",
    "HonestButCurious": "bract.server",
    "Observation": "bract.protocol.observation",
    "ObservationStore": "bract.protocol.observation",
    "keep": "bract.client",
    "listen": "bract.server",
    "reconstruct": "bract.attacks.registry",
    "witness": "bract.client",
    "write_report": "bract.report",
}

__all__ = [
    "Audit",
    "DefenseMod",
    "HonestButCurious",
    "Observation",
    "ObservationStore",
    "keep",
    "listen",
    "reconstruct",
    "witness",
    "write_report",
]

try:
    __version__ = version("bract")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"


__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
