"""A process that outlives the launcher for a moment, and takes its processes down with it.

The launcher holds the writing end of the guardian's standard input. When the launcher closes it,
or dies in any way, SIGKILL included, the guardian reads the end of the file, ends every process
that carries the federation's mark in its environment, and removes the temporary folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

import psutil

MARK = "BRACT_FEDERATION"


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return this user's processes whose environment holds ``BRACT_FEDERATION=mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def end_processes(mark: str, patience: float = 3.0) -> None:
    """End every marked process: SIGTERM first, SIGKILL after ``patience`` seconds."""
    for process in marked_processes(mark):
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left := marked_processes(mark):
        for process in left:
            _signal(process, signal.SIGKILL)
        time.sleep(0.02)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return


def main() -> None:
    """Wait for the end of standard input, then clean up; arguments: mark, temporary folder."""
    mark, folder = sys.argv[1:3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
