"""The processes of one federation: each with its log, watched together, none left behind.

Longer than most modules: a process is started, watched and ended in one place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bract.cli.launch.reaper import MARK, end_processes
from bract.disk.files import write_bytes
from bract.disk.permissions import UMASK, make_private_folder, open_private
from bract.errors import BractError, RunFailedError, one_line
from bract.process import timeline
from bract.process.logs import UNSENT, rotate
from bract.runtime import clock, shim, sockets
from bract.runtime.private_ray import SESSION_BYTES

READY_TIMEOUT = 90.0

_FORK_SERVER = "fork-server"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_log = logging.getLogger(__name__)


@dataclass
class _Process:
    name: str
    handle: subprocess.Popen[bytes]
    log: Path


class Processes:
    """Processes that start one after another and end together.

    Each writes to ``<logs>/<name>.log`` and carries a mark in its environment, as do the processes
    that it starts in turn. A reaper in a session of its own ends whatever carries the mark, also
    where this process is killed.

    Parameters
    ----------
    logs
        Folder of the logs; None until `attach`.
    threads
        Threads of one process where the environment sets none.
    fork_server
        Start Flower's short-lived processes from a fork server.
    run
        Run directory whose state the reaper corrects if this process is killed.
    simulate
        Whether the simulation engine's sockets are in the folder too.

    Attributes
    ----------
    folder
        Temporary folder of this user alone, removed at the end. The sockets of the processes are in
        it, so that no other user of the machine reaches one.
    """

    def __init__(
        self,
        logs: Path | None,
        *,
        threads: int,
        fork_server: bool,
        run: Path | None = None,
        simulate: bool = False,
    ) -> None:
        self.folder = _temporary_folder(SESSION_BYTES) if simulate else _temporary_folder()
        self._logs = self.folder if logs is None else logs
        self._threads = threads
        self.profile: Path | None = None
        self._forking = fork_server
        self._run = run
        self._mark = uuid.uuid4().hex
        self._epoch = clock.epoch()
        self._running: list[_Process] = []
        self._lost: set[str] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the reaper and, where processes are to be forked, the fork server."""
        self._start_reaper()
        if self._forking:
            if not self._running:
                self.warm_up()
            self.wait_for(self._socket.exists, "the fork server")

    def warm_up(self) -> None:
        """Start the fork server, which imports for seconds; `begin` waits until it serves.

        It ends by itself where this process is killed before `begin` has started the reaper.
        """
        server = [sys.executable, "-P", "-m", "bract.runtime.fork_server", str(self._socket)]
        self.start(_FORK_SERVER, [*server, "--with-parent"])

    def attach(self, logs: Path, run: Path) -> None:
        """Set the folder of the logs and the run, where those were not known at the start."""
        self._logs, self._run = logs, run
        for process in self._running:
            process.log = logs / process.log.name
        self._bring_log()

    def _bring_log(self) -> None:
        """Copy what the fork server wrote before the folder of the logs was known."""
        early = self.folder / f"{_FORK_SERVER}.log"
        with contextlib.suppress(OSError, BractError):
            write_bytes(self._logs / early.name, early.read_bytes())

    def _start_reaper(self) -> None:
        place = [] if self._run is None else [str(self._run.absolute())]
        command = [sys.executable, "-P", "-m", "bract.cli.launch.reaper", self._mark]
        self._reaper = subprocess.Popen(
            [*command, str(self.folder), *place], stdin=subprocess.PIPE, start_new_session=True
        )

    def end(self) -> None:
        """End every process and wait until they are gone."""
        code = 1
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            code = self._reaper.wait()
            self._reaper = None
        if code:  # it was killed, or did not start
            end_processes(self._mark)
        self._bring_log()
        for process in self._running:
            process.handle.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self, name: str, command: list[str], private: Mapping[str, str] | None = None
    ) -> None:
        """Start a process.

        ``private`` goes into its environment, which other users cannot read as they can its
        arguments.
        """
        log = self._logs / f"{name}.log"
        with open(log, "ab", opener=open_private) as file:
            handle = subprocess.Popen(
                command,
                env=self.environment(name) | dict(private or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=UMASK,
            )
        self._running.append(_Process(name, handle, log))

    def command(self, name: str) -> list[str]:
        """Return how to call one of Flower's commands."""
        from bract.runtime.children import command_line

        return command_line(name, forked=self._forking)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of the process ``name``, whose Flower home is its own."""
        environment = {
            **os.environ,
            MARK: self._mark,
            sockets.FOLDER: str(self.folder),
            clock.EPOCH: self._epoch,
            "FLWR_HOME": str(make_private_folder(self.folder / "flower" / name)),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads)),
            "PYTHONUNBUFFERED": "1",
            # Paths are handed on as UTF-8, also where the locale of this command has less.
            "PYTHONUTF8": "1",
        }
        if self._forking:
            environment[shim.SOCKET] = str(self._socket)
        if self.profile is not None:
            environment |= {timeline.FOLDER: str(self.profile), timeline.PARTY: name}
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
        if self._reaper is not None and self._reaper.poll() is not None:
            _log.warning("the process that cleans up after a crash was killed; another one started")
            self._start_reaper()
        for process in self._running:
            rotate(process.log)
            code = process.handle.poll()
            if code is None or process.name in self._lost:
                continue
            if process.name == _FORK_SERVER:
                self._bring_log()
            ended = f"{process.name} {_ending(code, process.log)}; see {process.log}"
            self._lost.add(process.name)
            if process.name not in expendable or self._lost.issuperset(expendable):
                raise RunFailedError(ended)
            _log.warning("%s; the run goes on without it", ended)

    def log_of_failure(self) -> Path | None:
        """Return the log of a client, or else of the server, that holds a traceback."""
        processes = [p for p in self._running if p.name.startswith("client-")]
        processes += [p for p in self._running if p.name == "superlink"]
        for process in processes:
            with contextlib.suppress(OSError):
                if b"Traceback (most recent call last)" in process.log.read_bytes():
                    return process.log
        return None

    def own_reasons(self) -> dict[str, str]:
        """Return why clients of this machine sent nothing, as their own logs have it, by client."""
        found = {}
        for process in self._running:
            with contextlib.suppress(OSError):
                text = process.log.read_text(encoding="utf-8", errors="replace")
                for client, reason in re.findall(rf"(\S+): {UNSENT} (.*)", text):
                    found[client] = one_line(reason, 300)
        return found

    def is_healthy(self, port: int) -> bool:
        """Return whether a SuperLink or SuperNode answers on the socket of ``port``."""
        return sockets.is_healthy(self.folder / f"{port}.sock")

    @property
    def _socket(self) -> Path:
        return self.folder / "fork.sock"


def threads_of(clients: int) -> int:
    """Return how many threads one of ``clients`` processes that compute at once may have."""
    return max(1, (os.cpu_count() or 1) // max(1, clients))


def _ending(code: int, log: Path) -> str:
    """Put an exit code in words, with the last line of the log; minus a signal's number is one."""
    if code >= 0:
        return f"ended by itself with code {code}{_last_words(log)}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _last_words(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [one_line(line, 300) for line in _COLOUR.sub("", text).split("\n") if line.strip()]
    return f": {lines[-1]}" if lines else ""


def _temporary_folder(room: int = 19) -> Path:
    """Make a folder of this user alone, its path short enough for a socket of ``room`` bytes."""
    places = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")
    for place in filter(None, places):
        # mkdtemp adds a slash and a name of 14 characters.
        short = len(os.fsencode(place)) + 15 + room <= sockets.LONGEST_PATH
        if short and os.access(place, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="bract-", dir=place))
    raise BractError(
        f"TMPDIR={tempfile.gettempdir()}: a Unix socket has a path of at most "
        f"{sockets.LONGEST_PATH} bytes, and one below this folder would have more; "
        "set TMPDIR to a folder with a shorter path",
        code="address-unusable",
    )
