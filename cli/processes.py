"""The processes of one federation: each with its log, watched together, none left behind."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from bract.cli.guardian import MARK
from bract.cli.warm import real_command, write_shims
from bract.errors import RunFailedError

READY_TIMEOUT = 90.0

_log = logging.getLogger(__name__)


@dataclass
class _Process:
    name: str
    handle: subprocess.Popen[bytes]
    log: Path


class Processes:
    """Processes that start one after another and end together.

    Each writes to ``<logs>/<name>.log`` and carries a mark in its environment, as do the processes
    that it starts in turn. A guardian in a session of its own ends whatever carries the mark, also
    where this process is killed.

    Parameters
    ----------
    logs
        Folder of the logs.
    threads
        Threads of one process where the environment does not say.
    warm
        Start Flower's short-lived processes from a fork server.

    Attributes
    ----------
    folder
        Temporary folder, removed at the end.
    """

    def __init__(self, logs: Path, *, threads: int, warm: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bract-"))
        self._logs = logs
        self._threads = threads
        self._warm = warm
        self._mark = uuid.uuid4().hex
        self._running: list[_Process] = []
        self._lost: set[str] = set()
        self._guardian: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the guardian and, where processes are to start warm, the fork server."""
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "bract.cli.guardian", self._mark, str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        if self._warm:
            write_shims(self.folder / "bin")
            self.start("warm", [sys.executable, "-m", "bract.cli.warm", str(self._socket)])
            self.wait_for(self._socket.exists, "the warm server")

    def end(self) -> None:
        """End every process and wait until they are gone."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None
        for process in self._running:
            process.handle.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, name: str, command: list[str]) -> None:
        """Start a process."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as file:
            handle = subprocess.Popen(
                command,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(_Process(name, handle, log))

    def command(self, name: str) -> list[str]:
        """Return how to call one of Flower's commands."""
        return [str(self.folder / "bin" / name) if self._warm else real_command(name)]

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of the process ``name``, whose Flower home is its own."""
        home = self.folder / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            MARK: self._mark,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads)),
            "PYTHONUNBUFFERED": "1",
        }
        real = str(Path(real_command("flwr")).parent)
        path = [real, environment.get("PATH", "")]
        if self._warm:
            environment["BRACT_WARM_SOCKET"] = str(self._socket)
            environment["BRACT_REAL_BIN"] = real
            path.insert(0, str(self.folder / "bin"))
        environment["PATH"] = os.pathsep.join(path)
        return environment

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Return once ``ready()`` is true.

        Raises
        ------
        RunFailedError
            If it is not within `READY_TIMEOUT`, or a process dies.
        """
        deadline = time.monotonic() + READY_TIMEOUT
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"{what} was not ready after {READY_TIMEOUT:.0f} s; see {self._logs}"
                )
            time.sleep(0.05)

    def check_alive(self, expendable: Collection[str] = ()) -> None:
        """Notice processes that have ended by themselves.

        Parameters
        ----------
        expendable
            Names of processes of which one is enough: the loss of another is logged, once.

        Raises
        ------
        RunFailedError
            If any other process has ended, or all of ``expendable``.
        """
        for process in self._running:
            code = process.handle.poll()
            if code is None or process.name in self._lost:
                continue
            ended = f"{process.name} ended by itself with code {code}; see {process.log}"
            self._lost.add(process.name)
            if process.name not in expendable or self._lost.issuperset(expendable):
                raise RunFailedError(ended, _tail(process.log))
            _log.warning("%s; the run goes on without it", ended)

    def last_traceback(self) -> str:
        """Return the last traceback that a client, or else the server, has logged."""
        processes = [p for p in self._running if p.name.startswith("client-")]
        processes += [p for p in self._running if p.name == "superlink"]
        for process in processes:
            text = process.log.read_text(errors="replace")
            start = text.rfind("Traceback (most recent call last)")
            if start >= 0:
                lines = text[start:].splitlines()
                ends = (i for i, line in enumerate(lines) if i and line[:1].strip())
                return f"{process.name}:\n" + "\n".join(lines[: next(ends, len(lines)) + 1])
        return ""

    @property
    def _socket(self) -> Path:
        return self.folder / "warm.sock"


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
