"""A SuperLink that is killed and started again: the run goes on."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bract.cli.launch.reaper import MARK, end_processes
from bract.deploy import sockets
from bract.rundir import RunDirectory

pytestmark = [pytest.mark.processes, pytest.mark.deployment]

CONFIG = """
name: theirs
clients: 2
rounds: 3
model: {name: lenet-strided, activation: relu}
training: {local_steps: 1}
"""


class Deployment:
    """`bract`'s long-lived commands as processes, each with a home of its own.

    Parameters
    ----------
    folder
        Empty folder for homes, sockets, logs and runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = folder.name + str(os.getpid())
        self.operator = folder / "o"

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``bract`` with these arguments."""
        environment = {
            **os.environ,
            MARK: self.mark,
            "FLWR_HOME": str(self.folder / f"home-{name}"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "bract.cli.main", *arguments],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def superlink(self, port: int) -> subprocess.Popen[bytes]:
        """Start the SuperLink and wait until it answers the operator."""
        process = self.start(
            "superlink",
            *("superlink", "--insecure", "--external", "--address", f"127.0.0.1:{port}"),
            *("--sockets", str(self.operator), "--database", str(self.folder / "state.db")),
        )
        place = self.operator / f"{port}.sock"
        wait_for(lambda: sockets.is_healthy(place), "the SuperLink", 120)
        return process


def wait_for(done: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s"
        time.sleep(0.2)


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Ends every process that the test has started."""
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        end_processes(made.mark)


def test_a_run_outlives_the_superlink(deployment: Deployment, free_port: int) -> None:
    folder = deployment.folder
    first = deployment.superlink(free_port)
    served = ("--sockets", str(deployment.operator), "--port", str(free_port))
    deployment.start("superexec", "superexec", *served)
    for i in range(2):
        deployment.start(
            f"client-{i}",
            *("supernode", "--insecure", "--superlink", f"127.0.0.1:{free_port}"),
            *("--sockets", str(folder / f"s{i}"), "--port", str(19094 + i)),
            *("--node-config", f'partition-id={i} num-partitions=2 state-dir="{folder}/state-{i}"'),
        )
    (folder / "federation.yaml").write_text(CONFIG)
    run = deployment.start(
        "run",
        *("run", str(folder / "federation.yaml"), "--runs", str(folder / "runs")),
        *("--superlink", str(deployment.operator / f"{free_port}.sock")),
    )
    directory = RunDirectory(folder / "runs" / "theirs")
    wait_for(lambda: max((r.round for r in directory.metrics()), default=0) >= 1, "round 1", 180)
    first.send_signal(signal.SIGKILL)
    first.wait()
    deployment.superlink(free_port)
    assert run.wait(240) == 0, (folder / "run.log").read_text()
    assert directory.state().status == "finished"
    assert [row.round for row in directory.metrics()] == [0, 1, 2, 3]
    assert all(not row.failures for row in directory.metrics())
