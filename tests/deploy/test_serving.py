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

from bract.cli.launch.reaper import MARK, end_processes
from bract.deploy import sockets
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
