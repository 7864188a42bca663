"""Facts as JSON that every reader takes: RFC 8259 has neither NaN nor infinity."""

from __future__ import annotations

import json
import math
from typing import Any


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
