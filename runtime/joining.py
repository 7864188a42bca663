"""An app joins the parts of an array in memory once, where Flower has them three times.

Flower keeps every part of a message until the whole of it is read, and joins the parts of an array
in a buffer that it copies: an app of a large model took three times the model's memory for each
message. Under this rule the parts are joined into the array's own bytes, and refer to those.

A part may come up many times in an array, as zeros do, so a message of a few kilobytes may claim
terabytes: an array that does not fit into the free memory is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bract.errors import BractError
from bract.installed.flower import installed, is_supported
from bract.runtime.rule import Layer, Rule

CGROUP = "/sys/fs/cgroup"
"""Folder of this process' container, where control groups are of version 2."""


def _put(_: str) -> Mapping[str, Layer]:
    # No name says in which order Flower reads parts: that was read in the source of some releases.
    return {_INFLATE: _joined} if is_supported(installed()) else {}


def _joined(read: Callable[..., Any]) -> Any:
    def inflate(_: type[Any], content: bytes, children: Mapping[str, Any] | None = None) -> Any:
        parts = children or {}
        order: list[str] = []
        noted: Any = {part: _Noted(part, order) for part in parts}
        array = read(content, noted)
        size = sum(len(parts[part].data) for part in order)
        if size > (free := free_memory()):
            raise BractError(
                f"an array of {size} bytes, and {free} are free; a part may repeat",
                code="out-of-memory",
            )
        array.data = b"".join(parts[part].data for part in order)
        whole, start = memoryview(array.data), 0
        for part in order:
            end = start + len(parts[part].data)
            parts[part].data = whole[start:end]
            start = end
        return array

    return classmethod(inflate)


_INFLATE = "flwr.app:Array.inflate"

RULE = Rule(
    name="arrays joined once",
    kind="speed",
    commands=("flwr-clientapp", "flwr-serverapp"),
    needs=(f"{_INFLATE}(children)",),
    does="An app joins the parts of a large array in memory once, not three times; with releases "
    "whose source was read alone.",
    without="An app of a large model takes three times the model's memory for each message.",
    put=_put,
)


def free_memory() -> int:
    """Return the bytes that this process may still take, by its machine and by its container."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    free = int(found[1]) << 10 if found else sys.maxsize
    limit, used = (_text(f"{CGROUP}/memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdigit() and used.isdigit()):
        return free
    # What the kernel keeps of files counts as used, and is given back when it is needed.
    kept = re.findall(r"^(?:in)?active_file (\d+)$", _text(f"{CGROUP}/memory.stat"), re.MULTILINE)
    return min(free, int(limit) - int(used) + sum(int(size) for size in kept))


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class _Noted:
    """Stands for a part; Flower checks the list of parts, and reads each in its place."""

    def __init__(self, part: str, order: list[str]) -> None:
        self._part, self._order = part, order

    @property
    def data(self) -> bytes:
        """Nothing; notes that the part was read."""
        self._order.append(self._part)
        return b""
