"""Start a federation as real processes on this machine, watch it, and leave none behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bract.cli.bundle import CONNECTION, app_manifest, connection
from bract.cli.guardian import MARK
from bract.cli.keygen import client_key, write_keys
from bract.cli.ports import free_ports, is_free, is_healthy
from bract.cli.warm import real_command, write_shims
from bract.config import FederationConfig
from bract.errors import BractError, RunFailedError
from bract.rundir import RunDirectory
from bract.seeds import derive_seed

READY_TIMEOUT = 90.0


@dataclass
class _Process:
    name: str
    handle: subprocess.Popen[bytes]
    log: Path


@dataclass
class Launch:
    """What `LocalFederation` needs beyond the configuration.

    Attributes
    ----------
    superlink
        ``host:port`` of a running SuperLink to use; None starts everything here.
    port
        Port of the SuperLink that is started; None takes a free one.
    devices
        Device of client ``i``; the configuration's where the list is shorter.
    warm
        Start Flower's short-lived processes from a fork server.
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
        self.mark = uuid.uuid4().hex
        self.run_id = ""
        self._folder = Path(tempfile.mkdtemp(prefix="bract-"))
        self._processes: list[_Process] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalFederation:
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "bract.cli.guardian", self.mark, str(self._folder)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the federation and wait until they are gone."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None
        for process in self._processes:
            process.handle.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def train(self, on_round: Callable[[dict[str, Any]], None]) -> None:
        """Submit the run and call ``on_round`` with each new row of ``metrics.jsonl``.

        Raises
        ------
        RunFailedError
            If the run fails or a process dies; the message names the client.
        """
        self.run_id = self._submit()
        seen = len(self.run.metrics())
        asked = time.monotonic()
        while True:
            rows = self.run.metrics()
            for row in rows[seen:]:
                on_round(row)
            seen = len(rows)
            state = self.run.state()
            if state.get("flower_run_id") == self.run_id and state.get("status") != "running":
                break
            self._check_alive()
            if time.monotonic() - asked > 15.0:
                asked = time.monotonic()
                if self._flower_status().startswith("finished") and not self._just_ended():
                    raise RunFailedError(
                        f"Flower ended run {self.run_id} before the server app reported; "
                        f"see {self.run.logs / 'superlink.log'}",
                        self._last_traceback(),
                    )
            time.sleep(0.1)
        if state["status"] == "failed":
            reason = str(state.get("error", "")).removeprefix("RunFailedError: ")
            raise RunFailedError(reason, self._last_traceback())

    def _start(self) -> None:
        port = self.launch.port
        if port is not None and not is_free(port):
            raise BractError(
                f"port {port} on 127.0.0.1 is in use; choose another with --port, or none"
            )
        if self.launch.warm:
            write_shims(self._folder / "bin")
            self._spawn(
                "warm", [sys.executable, "-m", "bract.cli.warm", str(self._folder / "warm.sock")]
            )
            self._wait_for((self._folder / "warm.sock").exists, "the warm server")
        if self.launch.superlink is None:
            address = self._start_superlink()
            self._start_supernodes(address)
        else:
            address = self.launch.superlink
        self._write_connection(address)
        self._write_app()

    def _start_superlink(self) -> str:
        port = self.launch.port or free_ports(1)[0]
        self._spawn(
            "superlink",
            [
                *self._command("flower-superlink"),
                "--insecure",
                "--disable-runtime-dependency-installation",
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
        )
        self._wait_for(lambda: is_healthy(port), "the SuperLink")
        return f"127.0.0.1:{port}"

    def _start_supernodes(self, address: str) -> None:
        ports = free_ports(self.config.clients)
        keys = self._keys()
        for client, port in enumerate(ports):
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
            self._spawn(
                name,
                [
                    *self._command("flower-supernode"),
                    "--insecure",
                    *("--superlink", address, "--port", str(port)),
                    *("--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in node.items())),
                ],
            )
        for client, port in enumerate(ports):
            self._wait_for(lambda port=port: is_healthy(port), f"client-{client}")  # type: ignore[misc]

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
        output = self._flwr("run", str(self._folder / "app"), CONNECTION, "--format", "json")
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

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command("flwr"), *arguments],
            env=self._environment("launcher"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + done.stderr

    def _command(self, name: str) -> list[str]:
        return [str(self._folder / "bin" / name) if self.launch.warm else real_command(name)]

    def _environment(self, name: str) -> dict[str, str]:
        home = self._folder / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // max(1, self.config.clients))
        environment = {
            **os.environ,
            MARK: self.mark,
            "FLWR_HOME": str(self._folder / "flower" / name),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "PYTHONUNBUFFERED": "1",
        }
        real = str(Path(real_command("flwr")).parent)
        path = [real, environment.get("PATH", "")]
        if self.launch.warm:
            environment["BRACT_WARM_SOCKET"] = str(self._folder / "warm.sock")
            environment["BRACT_REAL_BIN"] = real
            path.insert(0, str(self._folder / "bin"))
        environment["PATH"] = os.pathsep.join(path)
        return environment

    def _spawn(self, name: str, command: list[str]) -> None:
        log = self.run.logs / f"{name}.log"
        with log.open("ab") as file:
            handle = subprocess.Popen(
                command,
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(_Process(name, handle, log))

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT
        while not ready():
            self._check_alive()
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"{what} was not ready after {READY_TIMEOUT:.0f} s; see {self.run.logs}"
                )
            time.sleep(0.05)

    def _check_alive(self) -> None:
        for process in self._processes:
            code = process.handle.poll()
            if code is not None:
                raise RunFailedError(
                    f"{process.name} ended by itself with code {code}; see {process.log}",
                    _tail(process.log),
                )

    def _last_traceback(self) -> str:
        """Return the last traceback that a client, or else the server, has logged."""
        processes = [p for p in self._processes if p.name.startswith("client-")]
        processes += [p for p in self._processes if p.name == "superlink"]
        for process in processes:
            text = process.log.read_text(errors="replace")
            start = text.rfind("Traceback (most recent call last)")
            if start >= 0:
                lines = text[start:].splitlines()
                ends = (i for i, line in enumerate(lines) if i and line[:1].strip())
                return f"{process.name}:\n" + "\n".join(lines[: next(ends, len(lines)) + 1])
        return ""

    def _write_connection(self, address: str) -> None:
        home = Path(self._environment("launcher")["FLWR_HOME"])
        (home / "config.toml").write_text(connection(address))

    def _write_app(self) -> None:
        folder = self._folder / "app"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(app_manifest(self.config, self.run.root))


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
