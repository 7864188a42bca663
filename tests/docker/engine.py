"""Real containers: Docker Compose projects of the demo, and what runs in them."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from containers import FOLDER, ROOT

from bract.parse import parse_yaml

FILE = FOLDER / "compose.yaml"
TAG = next(
    line.removeprefix("BRACT_VERSION=")
    for line in (FOLDER / ".env").read_text().splitlines()
    if line.startswith("BRACT_VERSION=")
)


def why_not() -> str | None:
    """Return what this machine lacks for containers, or None."""
    if shutil.which("docker") is None:
        return "no docker command"
    for command in (["info"], ["compose", "version"]):
        asked = subprocess.run(["docker", *command], capture_output=True, text=True)
        if asked.returncode:
            return f"docker {' '.join(command)}: {asked.stderr.strip()[:200]}"
    return None


class Project:
    """One Compose project, with a federation of its own.

    Parameters
    ----------
    name
        Prefix of its containers, networks and volumes.
    folder
        Empty folder for what is laid over the compose file.
    federation
        What stands for ``federation.yaml``; None is the demo's own.
    """

    def __init__(self, name: str, folder: Path, federation: dict[str, Any] | None = None) -> None:
        self.name = name
        self.environment = dict(os.environ)
        self._files = [str(FILE)]
        if federation is not None:
            (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
            over = folder / "compose.over.yaml"
            mount = f"{folder / 'federation.yaml'}:/etc/bract/federation.yaml:ro"
            over.write_text(yaml.safe_dump({"services": {"federation": {"volumes": [mount]}}}))
            self._files.append(str(over))

    def command(self, *arguments: str) -> list[str]:
        """Return the words of ``docker compose`` on this project."""
        files = [word for file in self._files for word in ("-f", file)]
        return ["docker", "compose", "-p", self.name, *files, *arguments]

    def compose(
        self, *arguments: str, timeout: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run ``docker compose`` on this project."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def inside(self, service: str, *command: str, check: bool = True) -> str:
        """Return what a command prints in a running container."""
        done = self.compose("exec", "-T", service, *command, check=check, timeout=60)
        return done.stdout + ("" if check else done.stderr)

    def container(self, service: str) -> str:
        """Return the id of a service's container, running or not."""
        return self.compose("ps", "-aq", service).stdout.split()[0]

    def state(self, service: str) -> dict[str, Any]:
        """Return Docker's record of a container's state."""
        found: dict[str, Any] = inspect(self.container(service), "{{json .State}}")
        return found

    def end(self) -> None:
        """Remove containers, networks and volumes."""
        self.compose("down", "--volumes", "--timeout", "2", check=False)


class Party(Project):
    """The Compose project of one start-up kit, started as its README says.

    Parameters
    ----------
    name
        Prefix of its containers; None is the kit's own.
    kit
        Folder of the kit.
    over
        What is laid over the kit's own compose file; None leaves it as it is.
    """

    def __init__(self, kit: Path, name: str | None = None, over: dict[str, Any] | None = None):
        own = parse_yaml((kit / "compose.yaml").read_text())
        super().__init__(name or own["name"], kit)
        self.kit = kit
        self._files = [str(kit / "compose.yaml")]
        if over is not None:
            laid = kit.with_name(f"{kit.name}.over.yaml")
            laid.write_text(yaml.safe_dump(over))
            self._files.append(str(laid))
        self.environment |= {
            "COMPOSE_FILE": os.pathsep.join(self._files),
            "COMPOSE_PROJECT_NAME": self.name,
        }

    def readme(self) -> list[str]:
        """Return the commands that the kit's README prints, in its order."""
        blocks = re.findall(r"^```sh$(.*?)^```$", (self.kit / "README.md").read_text(), re.M | re.S)
        return [line for block in blocks for line in block.strip().splitlines()]

    def begin(self, command: str) -> subprocess.Popen[str]:
        """Start a command in the kit's folder."""
        return subprocess.Popen(
            shlex.split(command),
            cwd=self.kit,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str = "sh start.sh", *, code: int = 0, timeout: float = 300) -> str:
        """Return what a command prints in the kit's folder, and expect its exit code."""
        begun = self.begin(command)
        said, _ = begun.communicate(timeout=timeout)
        assert begun.returncode == code, f"{command}: {begun.returncode}\n{said[-3000:]}"
        return said

    def killed(self, service: str) -> None:
        """Kill a container's process as the kernel would, so that its restart policy answers."""
        os.kill(inspect(self.container(service), "{{json .State.Pid}}"), signal.SIGKILL)


@functools.cache
def build_images() -> None:
    """Build the images once; the cache answers where nothing changed."""
    built = subprocess.run(
        ["make", "images"], cwd=ROOT, capture_output=True, text=True, timeout=1700
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]


def docker(*arguments: str, check: bool = True) -> str:
    """Return what a ``docker`` command prints."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def inspect(thing: str, template: str) -> Any:
    """Return a part of what Docker knows of an image or container."""
    asked = subprocess.run(
        ["docker", "inspect", "--format", template, thing], capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def gateway_of(network: str) -> str:
    """Return the address that the engine's machine has on a network, or would have."""
    (config,) = inspect(network, "{{json .IPAM.Config}}")
    return config.get("Gateway") or str(ipaddress.ip_network(config["Subnet"])[1])


def run_image(
    part: str, command: Sequence[str], options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new container of one of the three images, as Compose would."""
    hardened = ("--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp")
    return subprocess.run(
        ["docker", "run", *hardened, *options, f"bract-{part}:{TAG}", *command],
        capture_output=True,
        text=True,
        timeout=180,
    )


def what_runs(name: str) -> list[str]:
    """Return the containers of a project that are running."""
    asked = subprocess.run(
        ["docker", "ps", "-q", "--filter", f"label=com.docker.compose.project={name}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return asked.stdout.split()
