"""Watch a process: its memory, its log lines, its timeline."""

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
