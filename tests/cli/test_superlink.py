"""A SuperLink and SuperNodes that somebody else started: `bract run --superlink` and `flwr run`."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bract.cli.launch.reaper import MARK, end_processes
from bract.rundir import RunDirectory
from bract.runtime.fork_server import real_command

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent

CONFIG = """
name: theirs
clients: 2
rounds: 1
model: {name: lenet-strided, activation: relu}
training: {local_steps: 2}
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def superlink(tmp_path: Path) -> Any:
    """The address of a SuperLink with two SuperNodes, started with Flower's own commands."""
    mark = tmp_path.name + str(os.getpid())
    port, *node_ports = (free_port() for _ in range(3))
    environment = {
        **os.environ,
        MARK: mark,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(real_command('flwr')).parent}:{os.environ['PATH']}",
    }

    def start(name: str, *command: str) -> None:
        home = tmp_path / f"home-{name}"
        home.mkdir()
        with (tmp_path / f"{name}.log").open("wb") as log:
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**environment, "FLWR_HOME": str(home)},
                stdout=log,
                stderr=log,
            )

    try:
        start(
            "superlink",
            real_command("flower-superlink"),
            *("--insecure", "--disable-runtime-dependency-installation", "--port", str(port)),
        )
        deadline = time.monotonic() + 60
        while not healthy(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        for i, node_port in enumerate(node_ports):
            start(
                f"node-{i}",
                real_command("flower-supernode"),
                *("--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(node_port)),
                *("--node-config", f"partition-id={i}"),
            )
        yield f"127.0.0.1:{port}"
    finally:
        end_processes(mark)


def test_a_running_superlink_serves_bract_run_and_flwr_run(superlink: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(CONFIG)
    done = subprocess.run(
        [real_command("bract"), "run", "theirs.yaml", "--superlink", superlink, "--insecure"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Server apps run where the SuperLink was started, which is here by chance.
    run = RunDirectory.open(next((tmp_path / "runs").glob("theirs-*")))
    assert set(run.metrics()[-1].clients) == {"client-0", "client-1"}

    home = tmp_path / "home-submit"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "s"\n\n[superlink.s]\naddress = "{superlink}"\ninsecure = true\n'
    )
    submitted = subprocess.run(
        [
            *(real_command("flwr"), "run", str(ROOT), "s"),
            *("-c", "rounds=1 clients=2", "-c", "training.lr=0.05"),
        ],
        env={**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with contextlib.suppress(StopIteration):
            folder = next((tmp_path / "runs").glob("flwr-run-*"))
            if RunDirectory(folder).state().status in ("finished", "failed"):
                break
        time.sleep(0.3)
    finished = RunDirectory.open(folder)
    assert finished.state().status == "finished", finished.state()
    assert finished.config().training.lr == 0.05
    assert len(list(finished.captures.glob("round-0001/*/observation.json"))) == 2
