"""Watch a process: its memory, its log lines, its timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.process.freed_memory import return_freed_memory
    from bract.process.logs import UNSENT, log_progress, log_to_file, log_to_stderr, rotate
    from bract.process.peak_memory import Peak, watched_memory
    from bract.process.timeline import merge, span

__all__ = [
    "UNSENT",
    "Peak",
    "log_progress",
    "log_to_file",
    "log_to_stderr",
    "merge",
    "return_freed_memory",
    "rotate",
    "span",
    "watched_memory",
]

_PLACES = {
    "Peak": "bract.process.peak_memory",
    "UNSENT": "bract.process.logs",
    "log_progress": "bract.process.logs",
    "log_to_file": "bract.process.logs",
    "log_to_stderr": "bract.process.logs",
    "merge": "bract.process.timeline",
    "return_freed_memory": "bract.process.freed_memory",
    "rotate": "bract.process.logs",
    "span": "bract.process.timeline",
    "watched_memory": "bract.process.peak_memory",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
