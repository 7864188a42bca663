"""The compose file read, and its containers as bare processes on 127.0.0.1."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bract.cli.launch.reaper import MARK, end_processes
from bract.runtime.fork_server import real_command

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docker"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CLIENTS = [name for name in SERVICES if name.startswith("client-")]


@dataclass(frozen=True)
class Mount:
    """One volume or file in a container; ``source`` of a file is a path beside the compose file."""

    source: str
    target: str
    writable: bool


def mounts(service: str) -> list[Mount]:
    """Read both forms of a service's volumes."""
    found = []
    for volume in SERVICES[service].get("volumes", []):
        if isinstance(volume, str):
            source, target, *mode = volume.split(":")
            found.append(Mount(source, target, mode != ["ro"]))
        else:
            writable = not volume.get("read_only", False)
            found.append(Mount(volume["source"], volume["target"], writable))
    return found


class BareContainers:
    """Runs the commands of the compose file, with host names, ports and paths put in place.

    A path that a container mounts leads to a folder of that container's own, where symbolic links
    stand for its volumes: what it does not mount is not there.

    Parameters
    ----------
    folder
        Empty folder for volumes, logs and homes.
    federation
        What stands for ``federation.yaml``.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self.folder = folder
        self.mark = folder.name + str(os.getpid())
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {"superlink": free_port(), **{name: free_port() for name in CLIENTS}}
        folder.joinpath("federation.yaml").write_text(federation)
        for service in SERVICES:
            for mount in mounts(service):
                link = self.root(service) / mount.target.lstrip("/")
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(self.source(mount))
        self._fork_server()

    def root(self, service: str) -> Path:
        """Return the folder that stands for a container's ``/``."""
        return self.folder / "containers" / service

    def source(self, mount: Mount) -> Path:
        """Return the file or folder that stands for what is mounted."""
        if mount.source.startswith("."):
            return self.folder / mount.source
        volume = self.folder / "volumes" / mount.source
        volume.mkdir(mode=0o700, parents=True, exist_ok=True)
        return volume

    def start(self, service: str) -> None:
        """Start a service after those that it depends on, each in the state that it waits for."""
        if service in self.started:
            return
        for needed, how in SERVICES[service].get("depends_on", {}).items():
            self.start(needed)
            if how["condition"] == "service_healthy":
                self._wait_until_healthy(needed)
            elif how["condition"] == "service_completed_successfully":
                self.finish(needed)
        self.started[service] = self._run(service, SERVICES[service]["command"])

    def finish(self, service: str, timeout: float = 240) -> None:
        """Wait for a service that ends by itself, and expect success."""
        code = self.started[service].wait(timeout)
        assert code == 0, self.log(service)

    def log(self, service: str) -> str:
        """Return what a service and its healthcheck have written."""
        return (self.folder / f"{service}.log").read_text(errors="replace")

    def end(self) -> None:
        """End every process."""
        end_processes(self.mark)
        for process in self.started.values():
            process.wait()

    def _wait_until_healthy(self, service: str) -> None:
        kind, *check = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        deadline = time.monotonic() + 90
        while self._run(service, check).wait() != 0:
            assert self.started[service].poll() is None, self.log(service)
            assert time.monotonic() < deadline, self.log(service)
            time.sleep(0.2)

    def _run(self, service: str, command: list[str]) -> subprocess.Popen[bytes]:
        home = self.folder / "h" / service
        home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{service}.log").open("ab") as log:
            return subprocess.Popen(
                [self._in_place(service, argument) for argument in command],
                cwd=home,
                env=self._environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _in_place(self, service: str, argument: str) -> str:
        assert "$" not in argument, "interpolation is Compose's"
        argument = argument.replace("superlink:8000", f"127.0.0.1:{self._ports['superlink']}")
        argument = argument.replace("0.0.0.0", "127.0.0.1")
        argument = argument.replace("8000.sock", f"{self._ports['superlink']}.sock")
        if service in self._ports:
            argument = re.sub(r"\b(8000|9094)\b", str(self._ports[service]), argument)
        tops = "|".join({mount.target.split("/")[1] for mount in mounts(service)})
        own = rf"(?<![\w.:/])/(?=(?:{tops})\b)"
        return re.sub(own, f"{self.root(service)}/", argument) if tops else argument

    def _environment(self, home: Path) -> dict[str, str]:
        real = Path(real_command("flwr")).parent
        return {
            **os.environ,
            MARK: self.mark,
            "HOME": str(home),
            "FLWR_HOME": str(home / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": "1",
            "BRACT_FORK_SERVER_SOCKET": str(self.folder / "fork.sock"),
            "PATH": os.pathsep.join([str(real), os.environ["PATH"]]),
        }

    def _fork_server(self) -> None:
        """Start Flower's processes from one that has imported everything, which saves a minute."""
        ready = self.folder / "fork.sock"
        self.started["fork-server"] = subprocess.Popen(
            [sys.executable, "-P", "-m", "bract.runtime.fork_server", str(ready)],
            env=self._environment(self.folder),
        )
        deadline = time.monotonic() + 90
        while not ready.exists():
            assert self.started["fork-server"].poll() is None and time.monotonic() < deadline
            time.sleep(0.1)


def free_port() -> int:
    """Return a port where nothing listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
