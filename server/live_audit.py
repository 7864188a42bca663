"""The process that attacks captures during training, which the server starts, watches and ends.

What is attacked and how is `bract.audit.follow`'s, which the server does not import: the two meet
on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bract.captures.stores import is_run_name
from bract.disk.permissions import make_private_folder, open_private
from bract.errors import BractError, one_line

_log = logging.getLogger(__name__)

LOG = "live-audit.log"
"""Name of the log next to the captures' folder."""

PATIENCE = 5.0
"""Seconds for which the process may go on after the request to end."""


class AuditProcess:
    """A live audit of one folder of captures.

    Nothing that goes wrong with the process is raised: a run trains on without it, and logs it
    once.

    Parameters
    ----------
    root
        The folder that holds ``captures/``.
    attacks
        Names of the attacks.
    every
        Rounds from one that is attacked to the next.
    models
        References ``package.module:callable`` that the attacks may import.
    """

    def __init__(
        self, root: Path, attacks: Sequence[str], every: int, models: Sequence[str] = ()
    ) -> None:
        self.root = root
        self._command = [sys.executable, "-P", "-m", "bract.audit.follow", str(root)]
        self._command += ["--every", str(every)]
        self._command += [word for name in attacks for word in ("--attack", name)]
        self._command += [word for name in models for word in ("--model", name)]
        self._process: subprocess.Popen[bytes] | None = None
        self._reported = False

    def start(self) -> None:
        """Start the process, once; look after it at every further call."""
        if self._process is not None:
            self._check()
            return
        if self._reported:
            return
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The app's own folder is on this process's path, and its model may be declared.
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            make_private_folder(self.root)
            with open(self.root / LOG, "ab", opener=open_private) as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **threads, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
                )
        except OSError as error:
            self._report(f"did not start: {one_line(error, 200)}")
        else:
            _give_way(self._process.pid)

    def stop(self) -> None:
        """End the process, and wait for its end at most `PATIENCE` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _check(self) -> None:
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            self._report(f"ended with {code}; see {self.root / LOG}")

    def _report(self, what: str) -> None:
        if not self._reported:
            _log.error(
                "the live audit %s; training goes on, and `bract audit %s --resume` does the rest",
                what,
                self.root,
            )
        self._reported = True


def _give_way(pid: int) -> None:
    """Restrict a process to the processor time that no other process wants."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def checked_attacks(audit: object, every: object) -> tuple[str, ...]:
    """Return the names of a live audit's attacks."""
    names = (audit,) if isinstance(audit, str) else audit
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        raise BractError(
            f"HonestButCurious: audit is {audit!r}, expected an attack such as 'auto', or several",
            code="config-value",
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise BractError(
            f"HonestButCurious: every is {every!r}, expected a number of rounds from 1",
            code="config-value",
        )
    return tuple(names)


def checked_store(store: Path) -> Path:
    """Return the folder that holds a run's captures, in which a live audit leaves its results."""
    if is_run_name(store.name):
        return store.absolute()
    if store.name != "captures":
        raise BractError(
            f"HonestButCurious: store is {store}; with audit= its last part must be 'captures', "
            "where an audit of the folder above it looks for them",
            code="config-value",
        )
    return store.absolute().parent
