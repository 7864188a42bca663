"""A deployment of long-lived processes on this machine: plain, with TLS, and behind a gateway."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from bract.cli.launch.reaper import MARK, end_processes
from bract.config import FederationConfig, build_config
from bract.kits import kit as kits
from bract.kits.kit import (
    open_kit,
)
from bract.kits.provisioning import provision
from bract.kits.site_file import (
    read_site,
)
from bract.runtime.sockets import is_healthy

PLAIN, TLS, GATEWAY = "deployed, plain", "deployed, TLS", "deployed, TLS and gateway"
BRACT = (sys.executable, "-P", "-m", "bract.cli.main")


@contextlib.contextmanager
def deployment(
    setup: str, clients: int, *, mark: str | None = None, load: str | None = None
) -> Iterator[Path]:
    """Start a SuperLink and SuperNodes in one of three setups; give the operator's socket.

    ``mark`` is what its processes carry in their environment; ``load`` is `bract supernode`'s.

    `PLAIN` has neither TLS nor authentication, `TLS` both, and `GATEWAY` is what start-up kits
    give: nginx before the SuperLink, TLS on both legs.
    """
    folder = Path(tempfile.mkdtemp(prefix="bract-deployed-"))
    mark = mark or uuid.uuid4().hex
    port, superlink_port = _free_ports(2)
    names = [f"site-{number}" for number in range(clients)]
    config = _federation(names, port, superlink_port)
    operator = folder / "kits" / "operator"
    place = folder / "sockets" / f"{superlink_port}.sock"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str | Path) -> None:
        home = folder / f"home-{name}"
        home.mkdir()
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                env={
                    **os.environ,
                    MARK: mark,
                    "HOME": str(home),
                    "FLWR_TELEMETRY_ENABLED": "0",
                    "FLWR_DISABLE_UPDATE_CHECK": "1",
                    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=log,
                stderr=log,
            )
            started.append(process)

    try:
        provision(config, folder / "kits", source=folder / "federation.yaml")
        start("superlink", *BRACT, "superlink", *_superlink(setup, operator, place))
        _wait(lambda: is_healthy(place))
        if setup != PLAIN:
            subprocess.run(
                [*BRACT, "site", "register", "--kit", operator, "--sockets", place.parent],
                check=True,
                capture_output=True,
            )
        if setup == GATEWAY:
            nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
            (folder / "prefix").mkdir()
            start(
                *("gateway", nginx, "-e", "stderr", "-p", folder / "prefix"),
                *("-c", operator / "nginx.conf"),
            )
            _wait(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
        for name in names:
            kit = folder / "kits" / name
            when = [] if load is None else ["--load", load]
            start(name, *BRACT, "supernode", *_supernode(setup, kit, superlink_port), *when)
            _wait(lambda kit=kit: is_healthy(kit / "sockets" / "9094.sock"))
        yield place
    finally:
        # nginx writes its title over its environment, so the mark does not find it.
        for process in started:
            process.terminate()
        end_processes(mark)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def stock(clients: int, models: str = "") -> Iterator[str]:
    """Start Flower's own SuperLink and SuperNodes, as they are installed; give the address.

    ``models`` is a model of ``package.module:name`` that the clients trust.
    """
    folder = Path(tempfile.mkdtemp(prefix="bract-stock-"))
    mark = uuid.uuid4().hex
    ports = _free_ports(clients + 1)
    address = f"127.0.0.1:{ports[0]}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BRACT_")}

    def start(name: str, command: str, *arguments: str) -> None:
        home = folder / f"home-{name}"
        home.mkdir()
        line = [str(Path(sys.executable).with_name(command)), "--insecure", *arguments]
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        own = {MARK: mark, "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with (folder / f"{name}.log").open("wb") as log:
            subprocess.Popen(
                line,
                env=environment | quiet | own | {"PATH": path},
                stdout=log,
                stderr=log,
            )

    try:
        start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(ports[0]))
        _wait(lambda: not socket.socket().connect_ex(("127.0.0.1", ports[0])))
        for client, port in enumerate(ports[1:]):
            own_part = f"partition-id={client} num-partitions={clients}"
            own_part += f' models="{models}"' if models else ""
            start(
                f"client-{client}",
                "flower-supernode",
                *("--superlink", address, "--host", "127.0.0.1", "--port", str(port)),
                *("--node-config", own_part),
            )
        yield address
    finally:
        end_processes(mark)
        shutil.rmtree(folder, ignore_errors=True)


def _superlink(setup: str, operator: Path, place: Path) -> list[str | Path]:
    shared: list[str | Path] = ["--sockets", place.parent]
    if setup == GATEWAY:
        return [*shared, "--kit", operator]
    shared += ["--address", f"127.0.0.1:{place.stem}", "--database", operator / "superlink.db"]
    if setup == PLAIN:
        return [*shared, "--insecure"]
    return [
        *(*shared, "--authenticate", "--certificate", operator / kits.SUPERLINK),
        *("--key", operator / kits.SUPERLINK_KEY, "--ca", operator / kits.CA),
    ]


def _supernode(setup: str, kit: Path, superlink_port: int) -> list[str | Path]:
    shared: list[str | Path] = ["--sockets", kit / "sockets"]
    if setup == GATEWAY:
        return [*shared, "--kit", kit]
    shared += ["--superlink", f"localhost:{superlink_port}"]
    shared += ["--node-config", read_site(kit, open_kit(kit, "site")).node_config(kit)]
    if setup == PLAIN:
        return [*shared, "--insecure"]
    return [*shared, "--root-certificates", kit / kits.CA, "--key", kit / kits.NODE_KEY]


def _federation(names: list[str], port: int, superlink_port: int) -> FederationConfig:
    deployed = {"server": "localhost", "port": port, "superlink_port": superlink_port}
    return build_config({"clients": len(names), "deployment": {**deployed, "sites": names}})


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _wait(ready: object) -> None:
    assert callable(ready)
    deadline = time.monotonic() + 180
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError("a process of the deployment was not ready in three minutes")
        time.sleep(0.1)
