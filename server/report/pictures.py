"""Pictures as data URIs: the report's own file is all it needs."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PIXELATED_BELOW = 96

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRAILER = b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class Picture:
    """An image of the report.

    Attributes
    ----------
    uri
        ``data:`` URI.
    state
        ``shown``, ``withheld`` (redacted), ``absent`` (never recorded) or ``broken``.
    pixelated
        Whether a small image is to be enlarged with hard pixel edges.
    """

    uri: str
    state: Literal["shown", "withheld", "absent", "broken"]
    pixelated: bool = False


def picture(root: Path, name: str | None, *, redact: bool) -> Picture:
    """Return the PNG ``root/name``, or a neutral tile in its place; redacted, nothing is read."""
    if redact:
        return Picture(_TILES["withheld"], "withheld")
    if name is None:
        return Picture(_TILES["absent"], "absent")
    try:
        content = (root / name).read_bytes()
    except OSError:
        return Picture(_TILES["broken"], "broken")
    if not content.startswith(_SIGNATURE) or not content.endswith(_TRAILER):
        return Picture(_TILES["broken"], "broken")
    width = int.from_bytes(content[16:20], "big")
    return Picture(_uri("image/png", content), "shown", pixelated=width < PIXELATED_BELOW)


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _tile(mark: str) -> str:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="32" height="32">'
        f'<rect width="32" height="32" fill="#9aa1ab" fill-opacity=".28"/>{mark}</svg>'
    )
    return _uri("image/svg+xml", svg.encode())


_STROKE = 'stroke="#7b838f" stroke-width="1.4" fill="none" stroke-linecap="round"'
_TILES = {
    "withheld": _tile(f'<path d="M9 16h14" {_STROKE}/>'),
    "absent": _tile(f'<circle cx="16" cy="16" r="5" {_STROKE} stroke-dasharray="1 3"/>'),
    "broken": _tile(f'<path d="M12 12l8 8m0-8l-8 8" {_STROKE}/>'),
}
