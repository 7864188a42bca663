"""Pictures as data URIs: the report's own file is all it needs."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageChops

PIXELATED_BELOW = 96

MOST_PIXELS = 1 << 22
"""Pixels of the largest picture that is decoded to show a difference."""

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
    content = _read(root, name)
    if content is None:
        return Picture(_TILES["broken"], "broken")
    return _shown(content)


def difference(
    root: Path, original: str | None, reconstruction: str | None, *, redact: bool
) -> Picture | None:
    """Return how far two pictures are apart in each pixel: black where they agree.

    None where one of them is not there, cannot be read or is of another size, and redacted.
    """
    if redact or original is None or reconstruction is None:
        return None
    contents = _read(root, original), _read(root, reconstruction)
    if contents[0] is None or contents[1] is None:
        return None
    try:
        one, other = _decoded(contents[0]), _decoded(contents[1])
    except (OSError, ValueError, SyntaxError, struct.error, zlib.error):
        return None
    if one.size != other.size:
        return None
    between = ImageChops.difference(one, other).convert("L")
    stream = io.BytesIO()
    between.save(stream, format="PNG", optimize=True)
    return _shown(stream.getvalue())


def _read(root: Path, name: str) -> bytes | None:
    """Return a whole PNG of the run directory; None where it is not one."""
    try:
        # The name comes from a file of the run directory, which may be another party's.
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            return None
        content = path.read_bytes()
    except (OSError, ValueError):
        return None
    whole = content.startswith(_SIGNATURE) and content.endswith(_TRAILER)
    return content if whole else None


def _decoded(content: bytes) -> Image.Image:
    width, height = _size(content)
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels")
    with Image.open(io.BytesIO(content), formats=("PNG",)) as found:
        return found.convert("RGB")


def _size(content: bytes) -> tuple[int, int]:
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def _shown(content: bytes) -> Picture:
    width, _ = _size(content)
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
