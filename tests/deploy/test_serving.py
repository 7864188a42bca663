"""A SuperLink and a SuperNode as an operator starts them: what their ports serve."""

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from bract.cli.launch.reaper import MARK, end_processes, marked_processes
from bract.deploy import fork_server, serving, shim, sockets
from bract.deploy.flower import command_line
from bract.deploy.pinned import DEFAULT_APP
from bract.deploy.sockets import OnlyPaths

ASKED = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/fleet/../control/start-run",
    "/v1/fleet",
    "/docs",
    "/",
)


def served(path: str, paths: tuple[str, ...]) -> bool:
    """Whether a request for ``path`` goes through."""
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        assert message.get("status", 404) == 404

    asyncio.run(OnlyPaths(app, paths)({"type": "http", "path": path}, None, send))
    return bool(reached)


@pytest.mark.parametrize("path", ASKED)
def test_nothing_but_the_named_paths_goes_through(path: Any) -> None:
    paths = ("/health", "/v1/fleet/")
    # What is left of a path with dots is looked up as it stands, and found nowhere.
    assert served(path, paths) == path.startswith("/v1/fleet/")
    assert not served(path, ("/health",))
    assert served("/health", paths) and served("/v1/fleet/pull-messages", paths)


def status(port: int | str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port if isinstance(port, int) else 80)
    if isinstance(port, str):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(port)
    try:
        connection.request("POST", path, b"", {"content-type": "application/x-protobuf"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.processes
def test_the_port_of_a_superlink_serves_sites_and_its_socket_the_operator(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mark = uuid.uuid4().hex
    folder = tmp_path / "operator"
    command = [sys.executable, "-P", "-m", "bract.cli.main", "superlink", "--insecure"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--address", f"127.0.0.1:{port}", "--sockets", str(folder)],
            env={**os.environ, MARK: mark, "HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"},
            stdout=log,
            stderr=log,
        )
    place = folder / f"{port}.sock"
    try:
        deadline = time.monotonic() + 120
        while not sockets.is_healthy(place):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
        refused = [status(port, path) for path in ASKED]
        assert set(refused) == {404}
        assert status(port, "/v1/fleet/register-node") not in (403, 404)
        assert status(str(place), "/v1/control/start-run") != 404
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        end_processes(mark)
        process.wait()


PARENT = """
import sys
from pathlib import Path
from bract.deploy.serving import _start_fork_server

_start_fork_server(Path(sys.argv[1]))
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_warm_supernode_s_fork_server_serves_and_ends_with_it(tmp_path: Path) -> None:
    place = tmp_path / "fork.sock"
    place.write_text("left by one that was killed")
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(place)],
        stdin=subprocess.PIPE,
        env=os.environ | {MARK: mark},
    )
    try:
        deadline = time.monotonic() + 120
        while not place.is_socket():
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        asked = subprocess.run(
            [*command_line("flwr", forked=True), "--version"],
            env=os.environ | {shim.SOCKET: str(place)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0 and "Flower version" in asked.stdout, asked.stderr
        (server,) = [p for p in marked_processes(mark) if p.pid != parent.pid]
        parent.kill()
        parent.wait()
        server.wait(60)
    finally:
        end_processes(mark)
        parent.wait()


def test_what_an_installation_has_none_of_is_not_imported_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server._preload("bract.no_such_room.app")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_on_import.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        fork_server._preload("breaks_on_import")


@pytest.mark.parametrize("warm", [True, False])
def test_a_supernode_starts_a_fork_server_unless_it_is_cold(
    warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    without = {key: value for key, value in os.environ.items() if key != shim.SOCKET}
    monkeypatch.setattr(os, "environ", without)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(os, "execv", lambda *_: sys.exit("becomes the SuperNode"))
    with pytest.raises(SystemExit, match="becomes"):
        serving.start_supernode(
            superlink="127.0.0.1:9",
            app=DEFAULT_APP,
            node_config="",
            folder=tmp_path / "sockets",
            port=9094,
            root_certificates=None,
            key=None,
            health=False,
            warm=warm,
        )
    place = str(tmp_path / "sockets" / "fork.sock")
    assert [command[-2:] for command in started] == [[place, "--with-parent"]] * warm
    assert os.environ.get(shim.SOCKET) == (place if warm else None)
