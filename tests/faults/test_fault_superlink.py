"""A SuperLink that is killed and started again, and a link that is slow and loses packets."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from breaking import measured

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
    before
        A command that runs those that listen on a port or connect to one.
    """

    def __init__(self, folder: Path, before: Sequence[str] = ()) -> None:
        self.folder = folder
        self.before = before
        self.mark = folder.name + str(os.getpid())
        self.operator = folder / "o"

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``bract`` with these arguments."""
        before = () if arguments[0] == "run" else self.before
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
                [*before, sys.executable, "-P", "-m", "bract.cli.main", *arguments],
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
        wait_for(lambda: sockets.is_healthy(place), "the SuperLink", 300)
        return process

    def clients(self, port: int, count: int = 2) -> None:
        """Start a SuperExec beside the SuperLink, and SuperNodes."""
        served = str(self.operator / f"{port}.sock")
        self.start("superexec", "superexec", "--sockets", served)
        for i in range(count):
            state = self.folder / f"state-{i}"
            node = f'partition-id={i} num-partitions={count} state-dir="{state}"'
            self.start(
                f"client-{i}",
                *("supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"),
                *("--sockets", str(self.folder / f"s{i}"), "--port", str(19094 + i)),
                *("--node-config", node),
            )

    def run(self, port: int) -> subprocess.Popen[bytes]:
        """Start the run."""
        (self.folder / "federation.yaml").write_text(CONFIG)
        return self.start(
            "run",
            *("run", str(self.folder / "federation.yaml"), "--runs", str(self.folder / "runs")),
            *("--superlink", str(self.operator / f"{port}.sock")),
        )


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
    first = deployment.superlink(free_port)
    deployment.clients(free_port)
    run = deployment.run(free_port)
    directory = RunDirectory(deployment.folder / "runs" / "theirs")
    wait_for(lambda: max((r.round for r in directory.metrics()), default=0) >= 1, "round 1", 300)
    first.send_signal(signal.SIGKILL)
    first.wait()
    deployment.superlink(free_port)
    assert_finished(deployment, run)


def assert_finished(deployment: Deployment, run: subprocess.Popen[bytes]) -> None:
    directory = RunDirectory(deployment.folder / "runs" / "theirs")
    assert run.wait(500) == 0, (deployment.folder / "run.log").read_text()
    assert directory.state().status == "finished"
    assert [row.round for row in directory.metrics()] == [0, 1, 2, 3]
    assert all(not row.failures for row in directory.metrics())


SLOW = """
ip link set lo mtu 1500 up
tc qdisc add dev lo root tbf rate 1mbit burst 10kb latency 2s
iptables -A INPUT -i lo -m statistic --mode random --probability 0.05 -j DROP
"""
"""A loopback of its own: 1 Mbit/s both ways together, and one packet of twenty is lost."""


@pytest.fixture
def slow_link(tmp_path: Path) -> Iterator[Deployment]:
    """A deployment whose SuperLink and SuperNodes reach each other by a bad link alone."""
    name = f"bract-{os.getpid()}"
    made = (
        subprocess.run(["ip", "netns", "add", name], check=False) if may_make_networks() else None
    )
    if made is None or made.returncode:
        pytest.skip("needs root, and ip, tc and iptables, to make a network")
    inside = ("ip", "netns", "exec", name)
    deployment = Deployment(tmp_path, inside)
    try:
        if subprocess.run([*inside, "sh", "-ec", SLOW], check=False).returncode:
            pytest.skip("this kernel cannot limit or lose packets")
        yield deployment
    finally:
        end_processes(deployment.mark)
        subprocess.run(["ip", "netns", "delete", name], check=True)


def may_make_networks() -> bool:
    return os.getuid() == 0 and all(map(shutil.which, ("ip", "tc", "iptables")))


def test_a_run_survives_a_slow_link_that_loses_packets(
    slow_link: Deployment, free_port: int
) -> None:
    slow_link.superlink(free_port)
    slow_link.clients(free_port)
    begun = time.monotonic()
    assert_finished(slow_link, slow_link.run(free_port))
    told = subprocess.run(
        [*slow_link.before, "iptables", "-nvxL", "INPUT"],
        capture_output=True,
        text=True,
        check=True,
    )
    (dropped,) = [int(line.split()[0]) for line in told.stdout.splitlines() if " DROP " in line]
    assert dropped > 0
    rows = RunDirectory(slow_link.folder / "runs" / "theirs").metrics()
    seconds = ", ".join(f"{row.seconds:.1f}" for row in rows[1:])
    measured(
        "1 Mbit/s, 5 % loss",
        0,
        time.monotonic() - begun,
        f"rounds of {seconds} s, {dropped} packets",
    )
