"""A process that outlives the launcher for a moment, and takes its processes down with it.

The launcher holds the writing end of the reaper's standard input. When the launcher closes it,
or dies in any way, SIGKILL included, the reaper reads the end of the file, ends every process
that carries the federation's mark in its environment, and removes the temporary folder. Where the
launcher died it also writes down that its run was interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil

from bract.disk.locks import LOCK, holder

_PATIENCE = 3.0
"""Seconds between SIGTERM and SIGKILL."""

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


def end_processes(mark: str) -> None:
    """End every marked process: SIGTERM first, SIGKILL after `_PATIENCE`."""
    for process in marked_processes(mark):
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
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


def record_interruption(root: Path) -> None:
    """Record in ``run.json`` that a run was interrupted, if no command works on it any more."""
    # Who launched the run holds its lock for as long as it lives.
    if not root.is_dir() or holder(root / LOCK) is not None:
        return
    from bract.errors import BractError
    from bract.rundir import RunDirectory

    run = RunDirectory(root)
    with contextlib.suppress(BractError), run.claim():
        if run.state().status in ("starting", "running"):
            run.update_state(status="interrupted", finished=time.time())


def main() -> None:
    """Wait for the end of standard input, then clean up.

    Arguments: mark, temporary folder and, where there is one, the run directory.
    """
    mark, folder, *run = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(mark)
    shutil.rmtree(folder, ignore_errors=True)
    for root in run:
        record_interruption(Path(root))


if __name__ == "__main__":
    main()
