"""How commands and processes end: which signal, what is said, and where the traceback is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
from pathlib import Path

import psutil
import pytest
from refusals import refused

from bract.cli import signals
from bract.cli.launch import processes as launching
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.cli.launch.processes import Processes
from bract.cli.launch.reaper import record_interruption
from bract.cli.signals import Stopped, explained, resumed
from bract.config import build_config
from bract.disk import utf8
from bract.rundir import RunDirectory
from bract.runtime import shim
from bract.runtime.serving import start_superlink

SLEEPER = """
import sys, time
import bract.cli.main as command
from bract.cli.signals import explained

def app(**_):
    with explained("the audit of runs/x", "bract audit runs/x --resume"):
        print("ready", flush=True)
        time.sleep(60)

command.app = app
command.main()
"""


SWALLOWED = """
import os, signal, time
from bract.cli.signals import Stopped, check, listen

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGHUP)
        # Another thread may be the one that the signal comes to.
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also below `nohup`
listen()
Dropped()
print("goes on")
try:
    check()
except Stopped as stopped:
    print(stopped.code)
check()
"""


@pytest.mark.faults
def test_a_signal_that_came_while_an_object_was_finalised_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SWALLOWED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "goes on\n129\n"


def test_a_run_hears_a_signal_that_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    config = build_config({})
    run.create(config)
    federation = LocalFederation(config, run, Launch(superlink="superlink:8000"))
    monkeypatch.setattr(federation, "_submit", lambda: "1")
    monkeypatch.setattr(signals, "_asked", [signal.SIGHUP])
    with pytest.raises(Stopped):
        federation.train(lambda row: None)
    federation.processes.end()


def start(*ignored: signal.Signals) -> subprocess.Popen[str]:
    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_answered_with_one_line_and_its_own_code(
    number: signal.Signals, code: int
) -> None:
    process = start()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said == (
        f"stopped by {number.name}: the audit of runs/x; go on with `bract audit runs/x --resume`\n"
    )


@pytest.mark.faults
def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    """`nohup bract run` outlives its terminal."""
    process = start(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_what_was_said_inside_is_the_only_word() -> None:
    with (
        pytest.raises(Stopped) as stopped,
        explained("all", "again"),
        explained("a part", "the part again"),
    ):
        raise Stopped(signal.SIGTERM)
    assert str(stopped.value) == "stopped by SIGTERM: a part; go on with `the part again`"


def test_how_to_go_on_is_this_command_line_with_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["bract", "-v", "run", "my file.yaml", "--overwrite", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", given)
    assert resumed("run", "else") == "bract -v run 'my file.yaml' --device cpu --resume"
    assert resumed("audit", "else") == "else"


@pytest.mark.faults
def test_processes_end_though_the_one_that_ends_them_was_killed(tmp_path: Path) -> None:
    processes = Processes(tmp_path, threads=1, fork_server=False)
    processes.begin()
    processes.start("superlink", [sys.executable, "-P", "-c", "import time; time.sleep(60)"])
    (running,) = processes._running
    assert processes._reaper is not None
    processes._reaper.kill()
    processes.end()
    assert running.handle.poll() is not None
    assert not processes.folder.exists()


@pytest.mark.faults
def test_another_process_takes_the_place_of_a_killed_reaper(tmp_path: Path) -> None:
    processes = Processes(tmp_path, threads=1, fork_server=False)
    processes.begin()
    try:
        first = processes._reaper
        assert first is not None
        first.kill()
        first.wait()
        processes.check_alive()
        second = processes._reaper
        assert second is not None and second.pid != first.pid
        assert psutil.pid_exists(second.pid)
    finally:
        processes.end()


@pytest.mark.faults
def test_a_process_that_was_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    processes = Processes(tmp_path, threads=1, fork_server=False)
    processes.begin()
    try:
        processes.start("superlink", [sys.executable, "-P", "-c", "import time; time.sleep(60)"])
        handle = processes._running[0].handle
        handle.kill()
        handle.wait()
        with refused("run-failed", "superlink", "SIGKILL"):
            processes.check_alive()
    finally:
        processes.end()


@pytest.mark.faults
def test_a_run_whose_launcher_died_is_noted_as_interrupted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.update_state(status="running")
    # This process stands for the launcher while it lives.
    with run.claim():
        subprocess.run([sys.executable, "-P", "-c", MEND, str(tmp_path)], check=True)
        assert run.state().status == "running"
    record_interruption(tmp_path)
    assert run.state().status == "interrupted"
    run.update_state(status="finished")
    record_interruption(tmp_path)
    assert run.state().status == "finished"
    record_interruption(tmp_path / "removed")
    assert not (tmp_path / "removed").exists()


MEND = """
import sys
from pathlib import Path
from bract.cli.launch.reaper import record_interruption
record_interruption(Path(sys.argv[1]))
"""

FORKED = """
import array, json, os, socket, sys
from bract.runtime import flower, fork_server

def fail(name):
    raise {error}

flower.run = fail
ours, theirs = socket.socketpair()
request = json.dumps({{"argv": ["flwr-clientapp"], "env": {{}}, "cwd": "/"}}).encode()
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
ours.sendmsg([len(request).to_bytes(4, "big")], [rights])
ours.sendall(request)
fork_server._run(theirs, *fork_server._receive(theirs), lambda: None)
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ZeroDivisionError('at the bottom')", "ZeroDivisionError: at the bottom"),
        ("SystemExit('it will not start')", "it will not start"),
        ("MemoryError", "MemoryError"),
    ],
)
def test_a_child_of_the_fork_server_leaves_its_last_words_in_the_log(error: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKED.format(error=error)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == said
    assert ("Traceback" in done.stderr) != ("SystemExit" in error)


@pytest.mark.faults
def test_a_child_that_is_killed_is_named_by_what_waits_for_it(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        length = int.from_bytes(connection.recv(4), "big")
        connection.recv(length, socket.MSG_WAITALL)
        connection.sendall(b"4711\n")
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    done = subprocess.run(
        [sys.executable, "-ISE", str(shim.__file__), "flwr-clientapp"],
        env={**os.environ, shim.SOCKET: str(tmp_path / "s")},
        capture_output=True,
        text=True,
        check=False,
    )
    thread.join()
    listener.close()
    assert done.returncode == 1
    assert done.stderr.startswith("flwr-clientapp: process 4711 was killed from outside")


def superlink(address: str, folder: Path) -> None:
    start_superlink(
        address=address, folder=folder, certificate=None, authenticate=False, database=None
    )


def test_a_busy_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with refused("address-unusable", address):
            superlink(address, tmp_path / "sockets")
    assert not (tmp_path / "sockets").exists()


def test_a_superlink_does_not_take_the_socket_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as other:
        port.bind(("127.0.0.1", 0))
        number = port.getsockname()[1]
        port.close()
        tmp_path.chmod(0o700)
        other.bind(str(tmp_path / f"{number}.sock"))
        other.listen()
        monkeypatch.setenv("BRACT_SOCKETS", "")
        monkeypatch.setenv("BRACT_OPEN", "")
        monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it started"))
        with refused("address-unusable", tmp_path):
            superlink(f"127.0.0.1:{number}", tmp_path)


def test_temporary_files_go_where_a_socket_has_room_for_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = launching._temporary_folder()
    try:
        assert len(str(folder / "fork.sock.starting")) <= 107
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()
    monkeypatch.setattr(os, "access", lambda place, mode: place == str(long))
    with refused("address-unusable", "TMPDIR=", 107, "TMPDIR"):
        launching._temporary_folder()


@pytest.mark.faults
def test_a_path_is_handed_on_as_utf_8_whatever_the_locale() -> None:
    program = (
        "import sys; from pathlib import Path; from bract.cli.bundle import app_manifest;"
        "from bract.config import FederationConfig;"
        "sys.stdout.write(app_manifest(FederationConfig(), Path(sys.argv[1])))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "/runs/größe-数"],
        env=environment,
        capture_output=True,
        check=True,
    )
    found = tomllib.loads(done.stdout.decode())["tool"]["flwr"]["app"]["config"]["run-dir"]
    assert found == "/runs/größe-数"
    assert utf8(Path("/runs/größe-数")) == "/runs/größe-数"
