"""What another user of the machine gets from the processes of a local run: nothing."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bract.cli.launch.launcher import Launch, LocalFederation
from bract.cli.launch.reaper import MARK, marked_processes
from bract.config import build_config
from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes

NOBODY = 65534

KNOCK = """
import http.client, json, socket, sys

def knock(place, path):
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(place)
        connection.request("POST", path, b"", {"content-type": "application/x-protobuf"})
        return connection.getresponse().status
    except OSError as error:
        return type(error).__name__

paths = ("/health", "/v1/control/start-run", "/v1/fleet/register-node", "/v1/runtime/acquire-task")
print(json.dumps([knock(place, path) for place in sys.argv[1:] for path in paths]))
"""


def listening(processes: list[psutil.Process]) -> list[Any]:
    """TCP ports on which any of the processes listens."""
    found = []
    for process in processes:
        try:
            found += [c for c in process.net_connections("inet") if c.status == "LISTEN"]
        except psutil.NoSuchProcess:
            continue
    return found


def knock(places: list[str], *, as_nobody: bool) -> list[int | str]:
    """Knock at every API behind the sockets."""
    command = [sys.executable, "-I", "-c", KNOCK, *places]
    if as_nobody:
        switch = [*("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY)), "--clear-groups"]
        command = [*switch, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: list[int | str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("fork_server", [True, False], ids=["forked", "cold"])
def test_another_user_reaches_no_api_of_a_run_and_the_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: Any
) -> None:
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    config = build_config(
        {
            "name": "closed",
            "clients": 1,
            "rounds": 1,
            "data": {"image_size": 16},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 1},
        }
    )
    run = RunDirectory(tmp_path / "closed")
    run.create(config)
    federation = LocalFederation(config, run, Launch(fork_server=fork_server))
    with federation:
        folder = federation.processes.folder
        federation._wait_for_supernodes()
        sockets = sorted(str(place) for place in folder.iterdir() if place.is_socket())
        assert [place.rsplit("/")[-1] for place in sockets if "fork" not in place] == [
            "8000.sock",
            "9094.sock",
        ]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        apis = [place for place in sockets if "fork" not in place]
        assert all(stat.S_IMODE(Path(place).stat().st_mode) == 0o600 for place in apis)
        mark = federation.processes.environment("launcher")[MARK]
        deadline = time.monotonic() + 120
        while len(mine := marked_processes(mark)) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert listening(mine) == []
        # Who may connect is answered, so the refusal below is that of the user.
        assert knock(apis, as_nobody=False)[0] != "PermissionError"
        if os.getuid() == 0 and shutil.which("setpriv"):
            assert set(knock(sockets, as_nobody=True)) == {"PermissionError"}
        arguments = [word for process in mine for word in process.cmdline()]
        assert not any("private-seed" in word for word in arguments)
        started = time.monotonic()
        federation.train(lambda row: None)
        assert time.monotonic() - started < 500
    assert run.state().status == "finished"
    assert not folder.exists()
