"""JSON that every reader takes, without NaN and infinity (RFC 8259), and bounded when read."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from bract.errors import BractError, one_line


def json_ready(value: Any) -> Any:
    """Return a copy in which numbers that JSON does not have are None, and tuples are lists."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dump_json(value: Any, *, ascii_only: bool = True) -> str:
    """Return indented JSON; see `json_ready` for what becomes of NaN and infinity."""
    return json.dumps(json_ready(value), indent=1, ensure_ascii=ascii_only, allow_nan=False)


def parse_json(text: str | bytes, *, most: int = 65_536, constants: bool = False) -> Any:
    """Read JSON of another party: whole numbers of 64 bits, and numbers that are finite.

    Parameters
    ----------
    most
        Longest text that is read, in characters or bytes.
    constants
        Whether NaN and infinities are read, as Python writes them, though JSON has none.

    Raises
    ------
    BractError
        If it is longer, no JSON, nested too deeply to be read, or holds a key twice, of which two
        readers may take another one, a larger whole number, or NaN or an infinity without
        ``constants``.
    """
    if len(text) > most:
        raise BractError(
            f"{len(text)} characters of JSON, expected at most {most}", code="text-malformed"
        )
    try:
        return json.loads(
            text,
            parse_int=_whole,
            parse_float=None if constants else _finite,
            parse_constant=None if constants else _refuse,
            object_pairs_hook=_once,
        )
    except RecursionError:
        raise BractError("JSON that is nested too deeply", code="text-malformed") from None
    except ValueError as error:
        raise BractError(f"no JSON: {one_line(error, 200)}", code="text-malformed") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = Counter(key for key, _ in pairs)
        raise ValueError(f"key {seen.most_common(1)[0][0][:40]!r} twice")
    return found


def _whole(digits: str) -> int:
    if len(digits) <= 20:
        value = int(digits)
        if in_64_bits(value):
            return value
    raise ValueError(f"a whole number of {len(digits)} digits; expected at most 64 bits")


def in_64_bits(value: int) -> bool:
    """Return whether a whole number is one that files of other parties may hold."""
    return -(1 << 63) <= value < 1 << 64


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a float")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")
