"""Start a federation as real processes on this machine, watch it, and leave none behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bract.cli.bundle import CONNECTION, app_manifest, connection
from bract.cli.keygen import client_key, write_keys
from bract.cli.ports import free_ports, is_free, is_healthy
from bract.cli.processes import Processes
from bract.config import FederationConfig
from bract.errors import BractError, RunFailedError
from bract.rundir import RunDirectory
from bract.seeds import derive_seed


@dataclass
class Launch:
    """What `LocalFederation` needs beyond the configuration.

    Attributes
    ----------
    superlink
        ``host:port`` of a running SuperLink to use; None starts everything here. Its machine or
        container must have the run directory at the same absolute path.
    port
        Port of the SuperLink that is started; None takes a free one.
    devices
        Device of client ``i``; the configuration's where the list is shorter.
    warm
        Start Flower's short-lived processes from a fork server, where they are started here.
    """

    superlink: str | None = None
    port: int | None = None
    devices: list[str] = field(default_factory=list)
    warm: bool = True


class LocalFederation:
    """One SuperLink and its SuperNodes as processes on loopback.

    Use as a context manager; on leaving it, in whatever way, every process is ended.
    """

    def __init__(
        self, config: FederationConfig, run: RunDirectory, launch: Launch | None = None
    ) -> None:
        self.config = config
        self.run = run
        self.launch = launch or Launch()
        self.run_id = ""
        threads = max(1, (os.cpu_count() or 1) // max(1, config.clients))
        warm = self.launch.warm and self.launch.superlink is None
        self.processes = Processes(run.logs, threads=threads, warm=warm)

    def __enter__(self) -> LocalFederation:
        try:
            self._start()
        except BaseException:
            self.processes.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes.end()

    def train(self, on_round: Callable[[dict[str, Any]], None]) -> None:
        """Submit the run and call ``on_round`` with each new row of ``metrics.jsonl``.

        Raises
        ------
        RunFailedError
            If the run fails or a process dies; the message names the client.
        """
        self.run_id = self._submit()
        seen = len(self.run.metrics())
        tolerant = self.config.strategy.tolerate_failures and self.launch.superlink is None
        clients = [f"client-{i}" for i in range(self.config.clients)] if tolerant else []
        asked = time.monotonic()
        while True:
            rows = self.run.metrics()
            for row in rows[seen:]:
                on_round(row)
            seen = len(rows)
            state = self.run.state()
            if state.get("flower_run_id") == self.run_id and state.get("status") != "running":
                break
            self.processes.check_alive(expendable=clients)
            if time.monotonic() - asked > 15.0:
                asked = time.monotonic()
                if self._flower_status().startswith("finished") and not self._just_ended():
                    raise RunFailedError(
                        f"Flower ended run {self.run_id} before its server app reported to "
                        f"{self.run.root}; {self._where_to_look()}",
                        self.processes.last_traceback(),
                    )
            time.sleep(0.1)
        if state["status"] == "failed":
            reason = str(state.get("error", "")).removeprefix("RunFailedError: ")
            raise RunFailedError(reason, self.processes.last_traceback())

    def _start(self) -> None:
        port = self.launch.port
        if port is not None and not is_free(port):
            raise BractError(
                f"port {port} on 127.0.0.1 is in use; choose another with --port, or none"
            )
        self.processes.begin()
        if self.launch.superlink is None:
            address = self._start_superlink()
            self._start_supernodes(address)
        else:
            address = self.launch.superlink
        self._write_connection(address)
        self._write_app()

    def _start_superlink(self) -> str:
        port = self.launch.port or free_ports(1)[0]
        self.processes.start(
            "superlink",
            [
                *self.processes.command("flower-superlink"),
                "--insecure",
                "--disable-runtime-dependency-installation",
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
        )
        self.processes.wait_for(lambda: is_healthy(port), "the SuperLink")
        return f"127.0.0.1:{port}"

    def _start_supernodes(self, address: str) -> None:
        ports = free_ports(self.config.clients)
        keys = self._keys()
        for client, port in enumerate(ports):
            self._start_supernode(client, address, port, keys)
        for client, port in enumerate(ports):
            self.processes.wait_for(lambda port=port: is_healthy(port), f"client-{client}")  # type: ignore[misc]

    def _start_supernode(self, client: int, address: str, port: int, keys: list[Path]) -> None:
        name = f"client-{client}"
        node: dict[str, str | int] = {
            "partition-id": client,
            "num-partitions": self.config.clients,
            "state-dir": str((self.run.root / "state" / name).absolute()),
            "private-seed": derive_seed(self.config.seed, "private", client),
        }
        if self.config.encryption.enabled:
            # The test split lies on this machine anyway, and the server has no model to judge.
            node["public-test"] = True
        if keys:
            node["paillier-key"] = str(keys[client].absolute())
        if client < len(self.launch.devices):
            node["device"] = self.launch.devices[client]
        if self.config.truth:
            node["truth-dir"] = str((self.run.truth / name).absolute())
        self.processes.start(
            name,
            [
                *self.processes.command("flower-supernode"),
                "--insecure",
                *("--superlink", address, "--port", str(port)),
                *("--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in node.items())),
            ],
        )

    def _keys(self) -> list[Path]:
        """Return each client's key file, after generating those of a run that has none yet."""
        encryption = self.config.encryption
        if not encryption.enabled or encryption.keys != "provisioned":
            return []
        files = [
            client_key(self.run.keys, client, encryption.threshold)
            for client in range(self.config.clients)
        ]
        if not all(file.is_file() for file in files):
            write_keys(self.run.keys, encryption, self.config.clients)
        return files

    def _submit(self) -> str:
        output = self._flwr(
            "run", str(self.processes.folder / "app"), CONNECTION, "--format", "json"
        )
        found = re.search(r'"run-id":\s*"(\d+)"', output)
        if found is None:
            raise RunFailedError(f"the SuperLink did not take the run: {' '.join(output.split())}")
        return found[1]

    def _flower_status(self) -> str:
        output = self._flwr("ls", "--run-id", self.run_id, CONNECTION, "--format", "json")
        found = re.search(r'"status":\s*"([a-z:]+)"', output)
        return found[1] if found else ""

    def _just_ended(self) -> bool:
        time.sleep(1.0)
        return self.run.state().get("status") in ("finished", "failed")

    def _where_to_look(self) -> str:
        if self.launch.superlink is None:
            return f"see {self.run.logs / 'superlink.log'}"
        return (
            f"see the log of the SuperLink at {self.launch.superlink}; there, "
            f"{self.run.root.absolute()} must be the same folder as here, and writable"
        )

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.processes.command("flwr"), *arguments],
            env=self.processes.environment("launcher"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + done.stderr

    def _write_connection(self, address: str) -> None:
        home = Path(self.processes.environment("launcher")["FLWR_HOME"])
        (home / "config.toml").write_text(connection(address))

    def _write_app(self) -> None:
        folder = self.processes.folder / "app"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(app_manifest(self.config, self.run.root))
