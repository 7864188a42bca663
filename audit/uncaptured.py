"""Lists next to the captures: replies that were missed, rounds that were removed, what left."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from bract.config import FederationConfig
from bract.errors import BractError, one_line
from bract.parse.strict_json import parse_json
from bract.schema.capture import MISSED, REMOVED, MissedCapture, RemovedRound
from bract.schema.claims import CLAIMS, ProtectionClaim
from bract.schema.left import LEFT, LEFT_BYTES, LeftReply

_log = logging.getLogger(__name__)

_Line = TypeVar("_Line", MissedCapture, RemovedRound, LeftReply, ProtectionClaim)


_WRITING = 0.2
"""Seconds in which a server that appends a line has written all of it."""

Skip = Callable[[Path, object], None]
"""Takes a file of which something could not be read, and the reason."""


def _warn(path: Path, reason: object) -> None:
    _log.warning("skipped %s: %s", path, reason)


def read_missed(root: Path, skip: Skip = _warn) -> list[MissedCapture]:
    """Read what the hook did not write down; ``skip`` hears of lines that are no such record."""
    return _read_lines(root / MISSED, MissedCapture, skip)


def read_removed(root: Path, skip: Skip = _warn) -> list[RemovedRound]:
    """Read which captured rounds gave way to later ones, as `read_missed` reads."""
    return _read_lines(root / REMOVED, RemovedRound, skip)


def read_left(root: Path, skip: Skip = _warn) -> list[LeftReply]:
    """Read what every reply held, as `read_missed` reads; none of captures of earlier versions."""
    return _read_lines(root / LEFT, LeftReply, skip, LEFT_BYTES)


def read_claims(root: Path, skip: Skip = _warn) -> list[ProtectionClaim]:
    """Read what a strategy and an app's code claim, as `read_missed` reads; each claim once."""
    return list(dict.fromkeys(_read_lines(root / CLAIMS, ProtectionClaim, skip)))


def check_at_hand(config: FederationConfig, root: Path) -> None:
    """Say where the captures of a run are that has none in its folder."""
    place = config.capture.place(config.name)
    if place is not None:
        raise BractError(
            f"{root}: its captures are at {one_line(place, 300)}; copy them first: "
            f"bract fetch {shlex.quote(one_line(place, 300))} {shlex.quote(str(root))}",
            code="captures-none",
        )


def _text(path: Path) -> str:
    """Return a file whose last line is whole, unless no one goes on writing it."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        time.sleep(_WRITING)
        content = path.read_bytes()
    return content.decode("utf-8", errors="replace")


def _read_lines(path: Path, record: type[_Line], skip: Skip, most: int = 65_536) -> list[_Line]:
    try:
        lines = _text(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        skip(path, error.strerror or error)
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(record.model_validate(parse_json(line, most=most)))
        except (BractError, ValidationError) as error:
            skip(path, f"line {number} is half-written or corrupted ({one_line(error, 100)})")
    return found
