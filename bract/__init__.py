"""Deploy a Flower federation that defends its updates, and audit what its server can learn.

The names below are imported when they are first used, so that ``import bract`` loads neither torch
nor Flower. Type checkers read them in ``__init__.pyi``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'bract' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
