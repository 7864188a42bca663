"""A federation that is provisioned for tests, and its processes: SuperLink, nginx, SuperNodes."""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from bract.certificates.authority import (
    read_node_key,
)
from bract.cli.launch.reaper import MARK, end_processes
from bract.config import FederationConfig, build_config
from bract.kits.kit import (
    CA,
    NODE_KEY,
)
from bract.runtime import sockets

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in found]


def federation(*sites: str | dict[str, Any], **changes: Any) -> FederationConfig:
    deployment = {"server": "localhost", "sites": list(sites)} | changes.pop("deployment", {})
    content = {
        "name": "study",
        "clients": len(sites),
        "rounds": 1,
        "model": {"name": "lenet-strided", "activation": "relu"},
        "training": {"local_steps": 2},
        "deployment": deployment,
    }
    return build_config(content | changes)


class Processes:
    """Processes of a deployment, each with its log; `end` leaves none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{folder.name}-{os.getpid()}"
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str | Path) -> None:
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        with self.log(name).open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(part) for part in command],
                env={
                    **os.environ,
                    MARK: self.mark,
                    "HOME": str(home),
                    "FLWR_TELEMETRY_ENABLED": "0",
                    "FLWR_DISABLE_UPDATE_CHECK": "1",
                    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def bract(self, name: str, *arguments: str | Path) -> None:
        self.start(name, *BRACT, *arguments)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait(self, ready: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            for name, process in self.started.items():
                assert process.poll() is None, f"{name}: {self.log(name).read_text()}"
            assert time.monotonic() < deadline, {
                name: self.log(name).read_text()[-2000:] for name in self.started
            }
            time.sleep(0.1)

    def end(self) -> None:
        # nginx writes its title over its environment, and the mark that it was started with.
        for process in self.started.values():
            process.terminate()
        end_processes(self.mark)
        for process in self.started.values():
            process.wait()


BRACT = (sys.executable, "-P", "-m", "bract.cli.main")


def bract(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BRACT, *(str(argument) for argument in arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def start_server(processes: Processes, operator: Path, superlink_port: int, port: int) -> None:
    """Start the SuperLink of an operator's kit, and nginx in front of it."""
    processes.bract("superlink", "superlink", "--kit", operator)
    place = operator / "sockets" / f"{superlink_port}.sock"
    processes.wait(lambda: sockets.is_healthy(place))
    start_gateway(processes, operator, port)


def start_gateway(processes: Processes, operator: Path, port: int) -> None:
    """Start nginx as an operator's kit configures it."""
    assert NGINX is not None
    prefix = processes.folder / "nginx"
    prefix.mkdir()
    processes.start("nginx", NGINX, "-e", "stderr", "-p", prefix, "-c", operator / "nginx.conf")
    processes.wait(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))


@contextlib.contextmanager
def connected(port: int, ca: Path, name: str | None = "localhost") -> Iterator[ssl.SSLSocket]:
    """A TLS connection to the gateway as a site makes it; without a name where it is None."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.check_hostname = name is not None
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        yield secure


def answers(port: int, ca: Path, request: bytes, name: str | None = "localhost") -> list[int]:
    """Send bytes and return the status of every answer, until the gateway closes or is silent."""
    with connected(port, ca, name) as secure:
        with contextlib.suppress(OSError):
            secure.sendall(request)
        received = b""
        secure.settimeout(2)
        with contextlib.suppress(OSError):
            while part := secure.recv(1 << 16):
                received += part
    return [
        int(line.split()[1])
        for line in received.split(b"\r\n")
        if line.startswith(b"HTTP/1.") and line.split()[1:2]
    ]


def signed(key: ec.EllipticCurvePrivateKey, age: float = 0.0) -> dict[str, str]:
    """The headers with which a SuperNode proves who it is."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    time = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
    stamp = time.isoformat()
    public = public_key_to_bytes(key.public_key())
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": base64.b64encode(sign_message(key, stamp.encode())).decode(),
    }


def headers_of(kit: Path) -> dict[str, str]:
    return signed(read_node_key(kit / NODE_KEY))


def ca_of(kit: Path) -> Path:
    return kit / CA
