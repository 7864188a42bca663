"""Start a federation as real processes on this machine, watch it, and leave none behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bract.cli import signals
from bract.cli.bundle import app_manifest
from bract.cli.console import say
from bract.cli.launch.own_clients import OwnClients
from bract.cli.launch.processes import Processes, threads_of
from bract.config import FederationConfig
from bract.disk.files import readable_size, write_text
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, RunFailedError, RunStoppedError, one_line
from bract.process.timeline import merge
from bract.protocol.codes import REFUSED
from bract.rundir import RunDirectory
from bract.runtime import sockets
from bract.runtime.pinned import APP, DEFAULT_APP
from bract.schema.metrics import MetricsRow

if TYPE_CHECKING:
    from bract.cli.remote.connection import Control
    from bract.cli.remote.where import Where

SERVER_INTERVAL = 1.0
"""Seconds between two looks at whether the server app lives."""

SUPERLINK_PORT = 8000
SUPERNODE_PORT = 9094
"""Number in the names of the sockets of the SuperLink and of client 0; no port is opened."""


ENDED = ("finished", "failed", "stopped")
"""What a server app notes in ``run.json`` at its end."""


@dataclass
class Launch:
    """Settings of `LocalFederation` beyond the configuration.

    Attributes
    ----------
    superlink
        ``host:port``, or the socket, of a running SuperLink to use; None starts everything here.
        Its machine or container must have the run directory at the same absolute path.
    devices
        Device of client ``i``; the configuration's where the list is shorter.
    fork_server
        Start Flower's short-lived processes from a fork server, where they are started here.
    client_app
        The one ClientApp that the clients run, ``package.module:name``, imported from what is
        installed and never from a run's bundle.
    private_seed
        What the private seed of each client is derived from, for an experiment that must repeat;
        None lets clients draw keys and noise from the operating system. Never the configuration's
        ``seed``, which the server knows.
    profile
        Note what each process does, and leave it as a trace in ``profile.json``.
    processes
        Where the fork server was started already (`bract.cli.launch.warming.warmed_up`).
    simulate
        Run the clients in Flower's simulation engine; see `bract.cli.launch.simulated`.
    at_once
        Clients that the simulation engine runs at a time; None decides by the cores.
    """

    superlink: str | None = None
    devices: list[str] = field(default_factory=list)
    fork_server: bool = True
    client_app: str = DEFAULT_APP
    private_seed: int | None = None
    profile: bool = False
    processes: Processes | None = None
    simulate: bool = False
    at_once: int | None = None


class LocalFederation:
    """One SuperLink and its SuperNodes as processes that no other user of this machine reaches.

    They listen on Unix sockets in a temporary folder of this user's and on no port: Flower's APIs
    ask for no password.

    Use as a context manager; on leaving it, in whatever way, every process is ended.
    """

    _bundled_app = DEFAULT_APP
    """The ClientApp that the run's bundle names."""

    def __init__(
        self, config: FederationConfig, run: RunDirectory, launch: Launch | None = None
    ) -> None:
        self.config = config
        self.run = run
        self.launch = launch or Launch()
        self.run_id = ""
        if self.launch.processes is None:
            fork_server = self.launch.fork_server and self.launch.superlink is None
            threads = threads_of(config.clients)
            self.processes = Processes(
                run.logs,
                threads=threads,
                fork_server=fork_server,
                run=run.root,
                simulate=self.launch.simulate,
            )
        else:
            self.processes = self.launch.processes
            self.processes.attach(run.logs, run.root)
        self._server_seen = False
        self._supernodes = 0

    def __enter__(self) -> Self:
        if self.launch.profile:
            self.processes.profile = self._profile
            shutil.rmtree(self._profile, ignore_errors=True)
            make_private_folder(self._profile)
        try:
            self._start()
        except BaseException:
            self.processes.end()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.processes.end()
        if self.launch.profile:
            try:
                merge(self._profile, self._profile.with_suffix(".json"))
            except BractError as failed:  # how the run ended is what counts
                say(f"warning: {failed}")

    @property
    def _profile(self) -> Path:
        return self.run.root.absolute() / "profile"

    def train(self, on_round: Callable[[MetricsRow], None]) -> None:
        """Submit the run and call ``on_round`` with each new row of ``metrics.jsonl``.

        Raises
        ------
        RunFailedError
            If the run fails or a process dies; the message names the client.
        """
        with self.run.serve():
            pass  # the server app of an earlier launch, which ends soon after its launcher
        seen = len(self.run.metrics())
        self.run_id = self._submit()
        self._wait_for_supernodes()
        tolerant = self.config.strategy.tolerate_failures and self.launch.superlink is None
        clients = [f"client-{i}" for i in range(self.config.clients)] if tolerant else []
        asked = looked = time.monotonic()
        waiting: str | None = None
        state, there = self.run.state(), list[tuple[int, int, int] | None]()
        while True:
            signals.check()
            now_there = self._stamps()
            if now_there != there:
                there = now_there
                # Before the rows: once the state is that of an ended run, all of them are there.
                state = self.run.state()
                if state.waiting not in (None, waiting):
                    say(one_line(state.waiting))
                waiting = state.waiting
                rows = self.run.metrics()
                for row in rows[seen:]:
                    on_round(row)
                seen = max(seen, len(rows))
            mine = state.flower_run_id == self.run_id
            if mine and self.launch.superlink is None:
                self._server_seen = True  # it reports with its lock held
            if mine and state.status in ENDED:
                break
            self.processes.check_alive(expendable=clients)
            now = time.monotonic()
            if mine and now - looked > SERVER_INTERVAL:
                looked = now
                self._check_server_app()
            # A local server app shows by its lock that it lives.
            if now - asked > 15.0 and (self.launch.superlink is not None or not self._server_seen):
                asked = now
                status = self._flower_status()
                if status.startswith("finished") and not self._just_ended():
                    self._check_stopped(status)
                    if mine:
                        raise self._ended_from_outside()
                    raise RunFailedError(
                        f"Flower ended run {self.run_id} before its server app reported to "
                        f"{self.run.root}; {self._where_to_look()}"
                    )
            time.sleep(0.1)
        if state.status == "stopped":
            raise self._stopped()
        if state.status == "failed":
            reason = one_line(state.error or "the server app failed", 2000)
            # These clients are this user's own; no server of another machine is sent this.
            own = self.processes.own_reasons() if REFUSED in reason else {}
            if own:
                reasons = "; ".join(f"{name}: {why}" for name, why in own.items())
                reason = f"{reason}. In the clients' own logs: {reasons}"
            log = self.processes.log_of_failure()
            raise RunFailedError(f"{reason} (traceback: {log})" if log else reason)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Return what changes with the state and the rows: reading all of them costs a core 7 %."""
        found: list[tuple[int, int, int] | None] = []
        for path in (self.run.state_path, self.run.metrics_path):
            try:
                of = path.stat()
                found.append((of.st_ino, of.st_size, of.st_mtime_ns))
            except OSError:
                found.append(None)
        return found

    def _check_server_app(self) -> None:
        """Notice that the server app, which was there, is gone without a final state.

        Raises
        ------
        RunFailedError
            Naming the last round that it finished.
        """
        if self.run.server() is not None:
            self._server_seen = True
            return
        if self._server_seen and not self._just_ended():
            # No other user reaches the control API of processes that were started here.
            if self.launch.superlink is not None:
                self._check_stopped(self._flower_status())
            raise self._ended_from_outside()

    def _ended_from_outside(self) -> RunFailedError:
        return RunFailedError(
            f"the server app was ended from outside after round {self._done}; "
            f"{self._where_to_look()}{_full_disk(self.run.root)}"
        )

    def _check_stopped(self, status: str) -> None:
        """Raise `RunStoppedError` if Flower's status of the run is that it was stopped."""
        if status == "finished:stopped":
            raise self._stopped()

    def _stopped(self) -> RunStoppedError:
        return RunStoppedError(self.run_id, self._done, how_to_resume(self.run))

    @property
    def _done(self) -> int:
        return max((row.round for row in self.run.metrics()), default=0)

    def _start(self) -> None:
        self.processes.begin()
        if self.launch.superlink is None:
            self._start_supernodes(self._start_superlink())
        else:
            self._superlink.connection()  # refused here, before anything else starts
        self._write_app()

    def _start_superlink(self, *options: str, private: Mapping[str, str] | None = None) -> str:
        from bract.runtime.parts_on_disk import FOLDER

        self.processes.start(
            "superlink",
            [
                *self.processes.command("flower-superlink"),
                "--insecure",
                "--disable-runtime-dependency-installation",
                *("--host", sockets.HOST, "--port", str(SUPERLINK_PORT)),
                *options,
            ],
            private={FOLDER: str(self.run.root)} | dict(private or {}),
        )
        self._wait_until_healthy("the SuperLink", SUPERLINK_PORT)
        return sockets.address(SUPERLINK_PORT)

    def _start_supernodes(self, address: str) -> None:
        keys = self._clients.keys()
        for client in range(self.config.clients):
            self._start_supernode(client, address, keys)
        self._supernodes = self.config.clients

    def _wait_for_supernodes(self) -> None:
        """Wait for the SuperNodes of this machine, which start while the run is submitted."""
        for client in range(self._supernodes):
            self._wait_until_healthy(f"client-{client}", SUPERNODE_PORT + client)

    def _wait_until_healthy(self, what: str, port: int) -> None:
        self.processes.wait_for(lambda: self.processes.is_healthy(port), what)

    def _start_supernode(self, client: int, address: str, keys: list[Path]) -> None:
        from bract.runtime.flower import NODE_CONFIG
        from bract.runtime.parts_on_disk import FOLDER

        node = self._node_config(client, keys)
        name = f"client-{client}"
        self.processes.start(
            name,
            [
                *self.processes.command("flower-supernode"),
                "--insecure",
                *("--superlink", address),
                *("--host", sockets.HOST, "--port", str(SUPERNODE_PORT + client)),
            ],
            private={
                FOLDER: str(self.run.root),
                APP: self.launch.client_app,
                NODE_CONFIG: " ".join(f"{k}={json.dumps(v)}" for k, v in node.items()),
            },
        )

    def _node_config(self, client: int, keys: Sequence[Path]) -> dict[str, str | int]:
        """Return the node config of one of the clients that are started here."""
        devices = self.launch.devices
        return self._clients.node_config(
            client,
            key=keys[client] if keys else None,
            device=devices[client] if client < len(devices) else None,
            private_seed=self.launch.private_seed,
        )

    @property
    def _clients(self) -> OwnClients:
        return OwnClients(self.config, self.run, self.processes.folder / "private")

    def _submit(self) -> str:
        app = self.processes.folder / "app"
        files = {str(path.relative_to(app)): path for path in app.rglob("*") if path.is_file()}
        with self._control() as control:
            return str(control.start(files, self._engine()))

    def _engine(self) -> Mapping[str, int | float]:
        """Return the settings of Flower's simulation engine, by their names in its protocol."""
        return {}

    def _flower_status(self) -> str:
        with self._control() as control:
            standing = control.standing(int(self.run_id))
        return f"finished:{standing.ending}" if standing.ended else standing.status

    @contextlib.contextmanager
    def _control(self) -> Iterator[Control]:
        """Open the SuperLink's control API; where it does not answer the run has failed."""
        from bract.cli.remote.connection import UnreachableError, connect

        try:
            with connect(self._superlink) as control:
                yield control
        except UnreachableError as error:
            raise RunFailedError(f"{error}; {self._where_to_look()}") from error

    @property
    def _superlink(self) -> Where:
        from bract.cli.remote.where import Where

        own = str(self.processes.folder / f"{SUPERLINK_PORT}.sock")
        named = self.launch.superlink or own
        return Where(named, insecure=not named.endswith(".sock"))

    def _just_ended(self) -> bool:
        time.sleep(1.0)
        return self.run.state().status in ENDED

    def _where_to_look(self) -> str:
        if self.launch.superlink is None:
            return f"see {self.run.logs / 'superlink.log'}"
        return (
            f"see the log of the SuperLink at {self.launch.superlink}; there, "
            f"{self.run.root.absolute()} must be the same folder as here, and writable"
        )

    def _write_app(self) -> None:
        folder = self.processes.folder / "app"
        manifest = app_manifest(self.config, self.run.root, self._bundled_app)
        write_text(folder / "pyproject.toml", manifest)


def how_to_resume(run: RunDirectory) -> str:
    """Return the command line that goes on with a run."""
    return signals.resumed("run", f"bract run {run.config_path} --runs {run.root.parent} --resume")


def _full_disk(folder: Path) -> str:
    """Return a note if the disk is full, since logs cannot be written then."""
    free = shutil.disk_usage(folder).free
    return f"; {folder} has {readable_size(free)} free" if free < 1_000_000 else ""
