"""A SuperLink that is killed and started again, and a link that is slow and loses packets."""

import base64
import datetime
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from breaking import measured
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.primitives import asymmetric

from bract.cli.launch.reaper import MARK, end_processes
from bract.rundir import RunDirectory
from bract.runtime import sockets

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

    def run(self, port: int, config: str = CONFIG) -> subprocess.Popen[bytes]:
        """Start the run."""
        (self.folder / "federation.yaml").write_text(config)
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
    listed = subprocess.run(
        [*slow_link.before, "iptables", "-nvxL", "INPUT"],
        capture_output=True,
        text=True,
        check=True,
    )
    (dropped,) = [int(line.split()[0]) for line in listed.stdout.splitlines() if " DROP " in line]
    assert dropped > 0
    rows = RunDirectory(slow_link.folder / "runs" / "theirs").metrics()
    seconds = ", ".join(f"{row.seconds:.1f}" for row in rows[1:])
    measured(
        "1 Mbit/s, 5 % loss",
        0,
        time.monotonic() - begun,
        f"rounds of {seconds} s, {dropped} packets",
    )


TOLERANT = """
name: theirs
clients: 3
rounds: 3
model: {name: lenet-strided, activation: relu}
training: {local_steps: 1}
strategy: {timeout: 20, tolerate_failures: true}
"""


class Outsider(threading.Thread):
    """A node that answers every question with a list of parts, and never sends one.

    It names the server's next records, each with a child that does not exist; the first list is
    longer than any may be.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/fleet", timeout=60)
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.lists: list[int] = []
        self.statuses: set[int] = set()
        self.ended = threading.Event()
        self.node = 0

    def signed(self) -> dict[str, str]:
        stamp = datetime.datetime.now(datetime.UTC).isoformat()
        public = asymmetric.public_key_to_bytes(self.key.public_key())
        signature = asymmetric.sign_message(self.key, stamp.encode())
        return {
            "flwr-public-key": base64.b64encode(public).decode(),
            "flwr-timestamp": stamp,
            "flwr-signature": base64.b64encode(signature).decode(),
        }

    def ask(self, path: str, request: Any, answer: Any = None) -> Any:
        kind = "application/protobuf"
        headers = {"content-type": kind, "accept": kind, **self.signed()}
        found = self.client.post(path, content=request.SerializeToString(), headers=headers)
        self.statuses.add(found.status_code)
        return answer.FromString(found.content) if answer and found.is_success else None

    def run(self) -> None:
        from flwr.proto import fleet_pb2

        key = asymmetric.public_key_to_bytes(self.key.public_key())
        self.ask("/register-node", fleet_pb2.RegisterNodeFleetRequest(public_key=key))
        activate = fleet_pb2.ActivateNodeRequest(public_key=key, heartbeat_interval=200)
        self.node = self.ask("/activate-node", activate, fleet_pb2.ActivateNodeResponse).node_id
        while not self.ended.wait(0.2):
            pull = fleet_pb2.PullMessagesRequest()
            pull.node.node_id = self.node
            found = self.ask("/pull-messages", pull, fleet_pb2.PullMessagesResponse)
            if found is not None and found.messages_list:
                self.answer(found.messages_list[0], found.message_object_trees[0])

    def answer(self, question: Any, tree: Any) -> None:
        from flwr.proto import fleet_pb2
        from flwr.proto.message_pb2 import ObjectTree

        asked = self.content(question.metadata.run_id, tree)
        claimed = [next_id for record in asked.values() for next_id in predicted(record)]
        never = ObjectTree(object_id="ab" * 32)
        claims = [ObjectTree(object_id=part, children=[never]) for part in claimed]
        if not self.lists:
            claims += [ObjectTree(object_id=f"{number:064x}") for number in range(15_000)]
        self.lists.append(len(claims))
        push = fleet_pb2.PushMessagesRequest()
        push.node.node_id = self.node
        push.clientapp_runtime_list.append(1.0)
        reply = push.messages_list.add()
        reply.CopyFrom(question)
        reply.metadata.message_id = root = f"{len(self.lists):064x}"
        reply.metadata.reply_to_message_id = question.metadata.message_id
        reply.metadata.src_node_id, reply.metadata.dst_node_id = self.node, 1
        reply.metadata.created_at, reply.metadata.ttl = time.time(), 10.0
        push.message_object_trees.append(ObjectTree(object_id=root, children=claims))
        self.ask("/push-messages", push)

    def content(self, run: int, tree: Any) -> RecordDict:
        from flwr.proto import message_pb2
        from flwr.supercore.inflatable import inflatable_object, inflatable_utils

        contents: dict[str, bytes] = {}
        for part in inflatable_object.iterate_object_tree(tree):
            pull = message_pb2.PullObjectRequest(run_id=run, object_id=part.object_id)
            pull.node.node_id = self.node
            while not contents.get(part.object_id) and not self.ended.wait(0.1):
                found = self.ask("/pull-object", pull, message_pb2.PullObjectResponse)
                contents[part.object_id] = found.object_content if found is not None else b""
        message = inflatable_utils.inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        return message.content


def predicted(record: object) -> list[str]:
    """Return the ids of a record and of those like it in the rounds to come."""
    if not isinstance(record, ConfigRecord):
        return []
    found = [record.object_id]
    for key, value in record.items():
        if type(value) is int:
            found += [ConfigRecord({**record, key: n}).object_id for n in range(5) if n != value]
    return found


def test_a_site_s_lists_of_parts_stop_no_other_site(deployment: Deployment, free_port: int) -> None:
    deployment.superlink(free_port)
    outsider = Outsider(free_port)
    outsider.start()
    deployment.clients(free_port, 2)
    run = deployment.run(free_port, TOLERANT)
    try:
        assert run.wait(500) == 0, (deployment.folder / "run.log").read_text()
    finally:
        outsider.ended.set()
        outsider.join(60)
    assert outsider.statuses == {200} and max(outsider.lists) > 15_000 and min(outsider.lists) > 0
    assert len(outsider.lists) >= 2
    rows = RunDirectory(deployment.folder / "runs" / "theirs").metrics()
    assert [row.round for row in rows] == [0, 1, 2, 3]
    assert all(len(row.clients) == 2 and (row.seconds or 0) < 60 for row in rows[1:])
    failures = [failure for row in rows for failure in row.failures]
    assert {failure.client for failure in failures} == {f"node-{outsider.node}"}
    assert "10000" in failures[0].reason
