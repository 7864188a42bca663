"""Bring files of earlier schema versions to the version that is read here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Content = dict[str, Any]
"""A decoded JSON object, before it is checked."""


def migrated(kind: str, content: Content) -> Content:
    """Return a file's content in the newest schema version that it can be brought to.

    Parameters
    ----------
    kind
        The record's `kind`, such as ``audit``.
    content
        As it was read; nothing in it has been checked.
    """
    while type(version := content.get("schema")) is int and (kind, version) in _STEPS:
        content = _STEPS[kind, version](dict(content))
    return content


def _audit_4(content: Content) -> Content:
    """Rename ``diagnosis`` and its ``told``, and count the scored images."""
    signals = content.pop("diagnosis", None)
    if isinstance(signals, dict):
        signals = dict(signals)
        signals["estimate"] = signals.pop("told", None)
    images = content.get("images")
    rows = images if isinstance(images, list) else []
    scored = content.get("scored") is True
    count = sum(isinstance(row, dict) and row.get("scores") is not None for row in rows)
    return content | {"schema": 5, "signals": signals, "scored": count if scored else 0}


def _metrics_2(content: Content) -> Content:
    """Nothing was late: answers after a round's end were not looked for."""
    return content | {"schema": 3}


_STEPS: dict[tuple[str, int], Callable[[Content], Content]] = {
    ("audit", 4): _audit_4,
    ("metrics", 2): _metrics_2,
}
"""By kind and version of a file: returns the content in the next version."""
