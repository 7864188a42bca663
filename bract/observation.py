"""Deprecated: the content of this module is in `bract.protocol.observation`."""

from __future__ import annotations

import warnings
from typing import Any

from bract.protocol import observation as _observation

_NAMES = {
    "Protocol": "ClientDeclaration",
    "ClientDeclaration": "ClientDeclaration",
    "Observation": "Observation",
    "ObservationStore": "ObservationStore",
    "SCHEMA_VERSION": "SCHEMA_VERSION",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = _NAMES[name]
    warnings.warn(
        f"bract.observation.{name} is deprecated and leaves with the next release; import "
        f"bract.protocol.observation.{now}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(_observation, now)
