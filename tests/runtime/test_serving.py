"""A SuperLink and a SuperNode as an operator starts them: what their ports serve."""

import asyncio
import http.client
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bract.cli.launch.reaper import MARK, end_processes, marked_processes
from bract.runtime import fork_server, serving, shim, sockets
from bract.runtime.children import command_line
from bract.runtime.pinned import APP, DEFAULT_APP
from bract.runtime.sockets import OnlyPaths

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


def torch_in(process: psutil.Process) -> bool:
    return "libtorch_cpu.so" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("load", ["start", "message"])
def test_a_waiting_site_loads_torch_in_one_process_or_in_none(load: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    place = folder / "fork.sock"
    place.write_text("left by one that was killed")
    command = [sys.executable, "-P", "-m", "bract.cli.main", "supernode", "--insecure"]
    command += ["--superlink", "127.0.0.1:9", "--sockets", str(folder), "--load", load]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with (tmp_path / "log").open("wb") as log:
        supernode = subprocess.Popen(
            command,
            env=os.environ | quiet | {MARK: mark, "HOME": str(tmp_path)},
            stdout=log,
            stderr=log,
        )

    def wait_for(ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not ready():
            assert supernode.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)

    def with_torch() -> list[int]:
        return [process.pid for process in marked_processes(mark) if torch_in(process)]

    try:
        # The SuperNode, its fork server, and the process that starts apps with its shim.
        wait_for(lambda: len(marked_processes(mark)) == 4)
        (server,) = [p for p in psutil.Process(supernode.pid).children() if p.children()]
        if load == "start":
            wait_for(lambda: with_torch() == [server.pid])
        asked = subprocess.run(
            [*command_line("flwr", forked=True), "--version"],
            env=os.environ | {shim.SOCKET: str(place)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert asked.returncode == 0 and "Flower version" in asked.stdout, asked.stderr
        assert with_torch() == ([server.pid] if load == "start" else [])
        # An app that cannot run here; what it needs is imported before it is started.
        app = subprocess.run(
            [*command_line("flwr-clientapp", forked=True), "--help"],
            env=os.environ | {shim.SOCKET: str(place), APP: DEFAULT_APP},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert app.returncode == 0, app.stderr
        assert with_torch() == [server.pid]
        supernode.kill()
        supernode.wait()
        server.wait(60)
    finally:
        end_processes(mark)
        supernode.wait()


@pytest.mark.processes
def test_a_fork_server_forks_apps_from_a_process_of_their_own_and_ends_with_it(
    tmp_path: Path,
) -> None:
    place = tmp_path / "fork.sock"
    code = (
        "import os, sys; from bract.runtime import fork_server as f\n"
        "f._ALL = ('wave',)\n"
        "f._run = lambda connection, request, *_: (\n"
        "    connection.sendall(f'{os.getpid()}\\n'.encode()),\n"
        "    connection.sendall(b'%d\\n' % ('wave' in sys.modules)), os._exit(0))\n"
        f"f.serve({str(place)!r}, parent=os.getppid())"
    )
    server = subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        while not place.exists():
            assert server.poll() is None
            time.sleep(0.05)
        (apps,) = psutil.Process(server.pid).children()
        for name, loaded in (
            ("flower-superlink", 0),
            ("flwr-clientapp", 1),
            ("flwr-simulation", 1),
        ):
            asked = subprocess.run(
                command_line(name, forked=True),
                env=os.environ | {shim.SOCKET: str(place)},
                timeout=60,
                check=False,
            )
            assert asked.returncode == loaded, name
        apps.kill()
        _, errors = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert "from which apps are forked was killed" in errors


@pytest.mark.processes
def test_a_fork_server_that_began_anew_serves_on_the_socket_that_was_open(tmp_path: Path) -> None:
    place = tmp_path / "fork.sock"
    mark = uuid.uuid4().hex
    anew = (
        "import os; from bract.runtime import fork_server as f\n"
        f"listener = f._listen({str(place)!r})\n"
        "f._Server(listener, os.getppid(), later=(), load='message')._begin_anew()"
    )
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", anew], env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not place.is_socket():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        asked = subprocess.run(
            [*command_line("flwr", forked=True), "--version"],
            env=os.environ | {shim.SOCKET: str(place)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert asked.returncode == 0 and "Flower version" in asked.stdout, asked.stderr
        assert b"--on" in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert not torch_in(psutil.Process(server.pid))
    finally:
        end_processes(mark)
        server.wait()


@pytest.mark.processes
def test_no_two_messages_draw_the_same_random_numbers(tmp_path: Path) -> None:
    """Noise that repeats is subtracted: the server of a run sees two messages of a client."""
    place = tmp_path / "fork.sock"
    code = (
        "import os; from bract.runtime import fork_server as f, flower\n"
        "def draw(name):\n"
        "    import random, secrets, uuid\n"
        "    import datasets.fingerprint as d, numpy, torch\n"
        "    from Crypto.Random import get_random_bytes\n"
        "    print(random.random(), numpy.random.normal(), float(torch.randn(())),\n"
        "          d.generate_random_fingerprint(), uuid.uuid4(), secrets.token_hex(8),\n"
        "          get_random_bytes(8).hex(), float(next(iter(torch.utils.data.RandomSampler(\n"
        "          range(2**40), True, 1)))))\n"
        "flower.run = draw\n"
        f"server = f._Server(f._listen({str(place)!r}), os.getppid(), later=())\n"
        "server.preload(f._ALL + f._SELDOM + ('Crypto.Random',)); server.run()"
    )
    server = subprocess.Popen([sys.executable, "-P", "-c", code])
    drawn = []
    try:
        while not place.exists():
            assert server.poll() is None
            time.sleep(0.05)
        for _ in range(2):
            asked = subprocess.run(
                command_line("flwr-clientapp", forked=True),
                env=os.environ | {shim.SOCKET: str(place)},
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            drawn.append(asked.stdout.split())
    finally:
        server.kill()
        server.wait()
    first, second = drawn
    assert len(first) == 8
    assert not set(first) & set(second)


@pytest.mark.processes
def test_what_a_superlink_and_a_supernode_import_is_without_torch() -> None:
    """Three processes of a site import these; torch is 0.3 GB in each."""
    modules = ["bract.runtime.flower", "bract.kits.starting", "bract.runtime.fork_server"]
    commands = ["flower-superlink", "flower-supernode", "flower-superexec"]
    code = (
        f"import sys, {', '.join(modules)}; from bract.installed.flower import entry_point\n"
        f"[entry_point(name) for name in {commands}]\n"
        "sys.exit(', '.join({'torch', 'sklearn', 'datasets'} & set(sys.modules)) or None)"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_a_site_s_fork_server_imports_what_an_app_has_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = socket.socket(socket.AF_UNIX)
    server = fork_server._Server(listener, None, later=("colorsys", "imghdr"), load="message")
    for name in server.later:
        sys.modules.pop(name, None)
    importlib.import_module("colorsys")
    keys = SimpleNamespace(unprepared=lambda: [("/" + "x" * 5000, 1), ("/here.key", 1)])
    monkeypatch.setitem(sys.modules, "bract.client.encrypted.keys", keys)
    server._report(["colorsys", "imghdr"])
    # A key that no line of a pipe can name hides neither modules nor other keys.
    os.set_blocking(server.seen, False)
    assert os.read(server.seen, 9999).splitlines() == [
        b'{"modules": ["colorsys"]}',
        b'{"key": ["/here.key", 1]}',
    ]
    # A server's imports change its process for good: which plug-ins there are, and its clock.
    imported: list[str] = []
    monkeypatch.undo()
    monkeypatch.setattr(server, "preload", imported.extend)
    gone = json.dumps({"key": [str(tmp_path / "gone.key"), 1]})
    server._learn(f'{gone}\n{{"modules": ["colorsys"]}}\n'.encode())
    assert imported == ["colorsys"]
    listener.close()


@pytest.mark.processes
def test_a_site_s_fork_server_makes_the_tables_of_a_key_for_the_apps_to_come(
    tmp_path: Path,
) -> None:
    """The first app that reads a key makes its own tables; the next finds wider ones."""
    code = f"""
import os, pathlib, socket, sys
from bract.client.encrypted import keys
from bract.paillier.scheme import scheme_for
from bract.config.encryption import EncryptionConfig
from bract.runtime import fork_server, key_files

folder = pathlib.Path({str(tmp_path)!r})
key_files.write_keys(folder, EncryptionConfig(scheme="paillier"), clients=2)
path = key_files.client_key(folder, 0, None)
server = fork_server._Server(socket.socket(socket.AF_UNIX), None, later=(), load="message")

def app():
    child = os.fork()
    if child == 0:
        key = keys.read_key(path, 1)
        table = scheme_for(key, 1).sides[0]._short._table
        print(len(keys.unprepared()), table is not None and table.window, flush=True)
        server._report([])
        os._exit(0)
    os.waitpid(child, 0)

app()
os.write(server.report, b"not JSON\\n")
server._learn(os.read(server.seen, 9999))
app()
"""
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert found.stderr == ""
    first, second = found.stdout.splitlines()
    assert first == "1 False"
    unprepared, window = map(int, second.split())
    assert unprepared == 0 and window >= 7


def test_what_an_installation_has_none_of_is_not_imported_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server._preload("bract.no_such_room.app")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_on_import.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        fork_server._preload("breaks_on_import")


@pytest.mark.parametrize("load", ["start", "message", "each"])
def test_a_supernode_starts_a_fork_server_unless_each_message_imports(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def become(_: str, command: list[str]) -> None:
        started.append(command)
        sys.exit("becomes the SuperNode")

    without = {key: value for key, value in os.environ.items() if key != shim.SOCKET}
    monkeypatch.setattr(os, "environ", without)
    monkeypatch.setattr(os, "execv", become)
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
            load=load,
        )
    place = str(tmp_path / "sockets" / "fork.sock")
    beside = ["--beside", place, load, "flower-supernode"]
    assert (started[0][4:8] == beside) is (load != "each")
    assert os.environ.get(shim.SOCKET) == (None if load == "each" else place)
