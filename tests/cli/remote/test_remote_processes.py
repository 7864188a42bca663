"""`bract run` at SuperLinks that share no folder with it: over TLS, and a forwarded socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ssh_server
from refusals import check_named

from bract.certificates.authority import Authority, certificate_pem, key_pem, new_key
from bract.cli.launch.reaper import MARK, end_processes
from bract.disk import write_bytes
from bract.rundir import RunDirectory
from bract.runtime import sockets
from bract.runtime.fork_server import real_command

pytestmark = [pytest.mark.processes, pytest.mark.deployment]

BRACT = (sys.executable, "-P", "-m", "bract.cli.main")

CONFIG = """
name: study
clients: {clients}
rounds: {rounds}
model: {{name: lenet-strided, activation: relu}}
training: {{local_steps: 1}}
{more}
"""


def free_ports(count: int) -> list[int]:
    found = [socket.socket() for _ in range(count)]
    try:
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in found]
    finally:
        for one in found:
            one.close()


def wait_for(done: Callable[[], bool], what: Callable[[], str], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


class Machines:
    """A server's folder, an operator's elsewhere, and the processes that the test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{folder.name}-{os.getpid()}"
        self.server = folder / "server"
        self.operator = folder / "operator"
        self.captured = folder / "captured"
        self.address = ""
        for made in (self.server, self.operator):
            made.mkdir()

    def environment(self, name: str) -> dict[str, str]:
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        return {
            **os.environ,
            MARK: self.mark,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "OMP_NUM_THREADS": "1",
            "BRACT_CAPTURES": str(self.captured),
            "PATH": f"{Path(real_command('flwr')).parent}:{os.environ['PATH']}",
        }

    def start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        """Start a process of the server or a site."""
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [str(word) for word in command],
                cwd=self.server,
                env=self.environment(name),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def bract(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command as the operator, on a machine that has nothing of the server's."""
        return subprocess.run(
            [*BRACT, *(str(argument) for argument in arguments)],
            cwd=self.operator,
            env=self.environment("operator"),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def config(self, clients: int, rounds: int, more: str = "") -> Path:
        path = self.operator / f"study-{clients}-{rounds}{len(more)}.yaml"
        path.write_text(CONFIG.format(clients=clients, rounds=rounds, more=more))
        return path

    def left_here(self) -> set[str]:
        """What the operator's machine has beside configurations."""
        return {path.name for path in self.operator.iterdir() if path.suffix != ".yaml"}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A SuperLink with TLS and two SuperNodes that know its CA, and an operator elsewhere."""
    folder = Path(tempfile.mkdtemp(prefix="bract-remote-"))
    made = Machines(folder)
    try:
        authority, key = Authority.create("study", 30), new_key()
        (folder / "ca.crt").write_bytes(certificate_pem(authority.certificate))
        write_bytes(folder / "server.key", key_pem(key), private=True)
        issued = authority.issue("superlink", key, hosts=["127.0.0.1"], days=10)
        (folder / "server.crt").write_bytes(certificate_pem(issued))
        port, *node_ports = free_ports(3)
        made.start(
            "superlink",
            *(real_command("flower-superlink"), "--port", str(port)),
            *("--disable-runtime-dependency-installation", "--database", folder / "state.db"),
            *("--ssl-ca-certfile", folder / "ca.crt", "--ssl-certfile", folder / "server.crt"),
            *("--ssl-keyfile", folder / "server.key"),
        )
        (folder / "home-operator").mkdir()
        (folder / "home-operator" / "config.toml").write_text(
            f'[superlink.ours]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{folder}/ca.crt"\n'
        )
        made.address = f"127.0.0.1:{port}"
        wait_for(
            lambda: not socket.socket().connect_ex(("127.0.0.1", port)),
            lambda: made.log("superlink").read_text(),
        )
        for i, node_port in enumerate(node_ports):
            made.start(
                f"site-{i}",
                *(*BRACT, "supernode", "--superlink", f"127.0.0.1:{port}"),
                *("--root-certificates", folder / "ca.crt"),
                *("--sockets", folder / f"s{i}", "--port", str(node_port)),
                *("--node-config", f'partition-id={i} state-dir="{folder}/state-{i}"'),
            )
        yield made
    finally:
        end_processes(made.mark)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_comes_over_the_log_and_lies_at_the_server(machines: Machines) -> None:
    done = machines.bract(
        *("run", machines.config(2, 2), "--superlink", machines.address),
        *("--root-certificates", machines.folder / "ca.crt", "--format", "json"),
    )
    logs = [machines.log(name).read_text()[-3000:] for name in ("superlink", "site-0")]
    assert done.returncode == 0, (done.stderr, logs)
    found = json.loads(done.stdout)
    assert [row["round"] for row in found["metrics"]] == [0, 1, 2]
    assert "round 1/2: 2 clients, test loss" in done.stderr
    assert machines.left_here() == set()
    # Captures lie where the server's operator says, not where the SuperLink was started.
    run = RunDirectory.open(machines.captured / f"study-{found['run_id']}")
    assert found["run"] == str(run.root)
    assert [row.to_dict() for row in run.metrics()] == found["metrics"]
    assert len(list(run.captures.glob("round-0002/*/observation.json"))) == 2
    assert not (machines.server / "runs").exists()
    assert f"at the server, captures go to {run.captures}" in done.stderr.splitlines()

    # Followed again, by a profile of Flower's, everything is there once more.
    again = machines.bract("follow", found["run_id"], "--superlink", "ours", "--format", "json")
    assert (again.returncode, json.loads(again.stdout)) == (0, found), again.stderr

    # The pack is made there and taken here, as ssh would bring it.
    with subprocess.Popen(
        [*BRACT, "pack", str(run.root), "--out", "-"], stdout=subprocess.PIPE, cwd=machines.server
    ) as there:
        here = subprocess.run(
            [*BRACT, "pull", "-", "--out", "study"],
            cwd=machines.operator,
            stdin=there.stdout,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (there.returncode, here.returncode) == (0, 0), here.stderr
    brought = machines.operator / "study"
    assert {path.name for path in brought.iterdir()} == {
        *("report.html", "report.json", "metrics.jsonl", "final.safetensors")
    }
    shutil.rmtree(brought)


def test_a_run_that_fails_there_fails_here_with_its_reason(machines: Machines) -> None:
    config = machines.config(2, 1, "data: {name: folder, path: /nowhere/at/all}")
    done = machines.bract("run", config, "--superlink", "ours")
    assert done.returncode == 1, done.stderr
    assert re.search(r"error: run \d+ failed: .*/nowhere/at/all", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert machines.left_here() == set()


def test_ctrl_c_leaves_the_run_going_and_stop_ends_it(machines: Machines) -> None:
    running = subprocess.Popen(
        [*BRACT, "run", str(machines.config(2, 500)), "--superlink", "ours"],
        cwd=machines.operator,
        env=machines.environment("operator"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    said = ""
    for line in running.stderr:
        said += line
        if "round 1/500" in line:
            break
    running.send_signal(signal.SIGINT)
    said += running.stderr.read()
    assert running.wait(60) == 130, said
    found = re.search(r"run (\d+) goes on at ours; follow it with `bract (follow \d+ .*?)`", said)
    assert found, said
    check_named(said, found[1], "--superlink")
    metrics = RunDirectory(machines.captured / f"study-{found[1]}")
    seen = len(metrics.metrics())
    wait_for(lambda: len(metrics.metrics()) > seen, lambda: "the run did not go on")

    stopped = machines.bract("stop", found[1], "--superlink", "ours")
    assert stopped.returncode == 0, stopped.stderr
    followed = machines.bract(*found[2].split())
    assert followed.returncode == 1
    assert re.search(rf"error: run {found[1]} was stopped after round \d", followed.stderr)
    twice = machines.bract("stop", found[1], "--superlink", "ours")
    assert twice.returncode == 2
    assert "has ended already (stopped)" in twice.stderr


def test_a_foreign_ca_and_an_unknown_run_are_one_line(machines: Machines) -> None:
    other = machines.folder / "other.crt"
    other.write_bytes(certificate_pem(Authority.create("other", 30).certificate))
    address = machines.address
    config = machines.config(2, 1)
    for arguments, said in (
        (("--superlink", address, "--root-certificates", other), "another CA signed"),
        (("--superlink", address, "--insecure"), "pass --root-certificates"),
    ):
        done = machines.bract("run", config, *arguments)
        assert done.returncode == 2, done.stderr
        assert said in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
    unknown = machines.bract("follow", "12345", "--superlink", "ours")
    assert unknown.returncode == 2, unknown.stderr
    assert "not found" in unknown.stderr.lower(), unknown.stderr


STRANGERS = {
    "pyproject.toml": """
[project]
name = "theirs"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "theirs.app:server"
clientapp = "theirs.app:client"
[tool.flwr.app.config]
""",
    "theirs/__init__.py": "",
    "theirs/app.py": """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from bract.server import HonestButCurious

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = HonestButCurious(strategy, store="captures")
    model = torch.nn.Linear(3, 2)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)


@client.train()
def train(message, context):
    state = message.content["arrays"].to_torch_state_dict()
    state = {name: value + 1 for name, value in state.items()}
    metrics = MetricRecord({"num-examples": 4})
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
    return Message(content, reply_to=message)
""",
}


def forward(source: Path, target: Path) -> None:
    """Lead connections at one socket to another, as `ssh -L` does, where there is no SSH."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(source))
    listener.listen()

    def copy(a: socket.socket, b: socket.socket) -> None:
        try:
            while piece := a.recv(1 << 16):
                b.sendall(piece)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(target))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def through_ssh(made: Machines, login: list[str], run: str) -> None:
    """Audit and pack a run where it lies, and bring the pack here, as the documents have it."""
    python = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')} {sys.executable} -P -m bract.cli.main"
    audit = f"{python} audit {run} --attack labels --yes"
    audited = subprocess.run([*login, audit], capture_output=True, text=True, check=False)
    assert audited.returncode == 0, audited.stderr
    with subprocess.Popen([*login, f"{python} pack {run} --out -"], stdout=subprocess.PIPE) as pack:
        pulled = subprocess.run(
            [*BRACT, "pull", "-", "--out", "brought"],
            stdin=pack.stdout,
            cwd=made.operator,
            env=made.environment("operator"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert (pack.returncode, pulled.returncode) == (0, 0), pulled.stderr
    brought = {path.name for path in (made.operator / "brought").rglob("*") if path.is_file()}
    assert {"report.html", "report.json", "metrics.jsonl"} <= brought


def test_a_strangers_captures_land_where_the_servers_operator_says() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bract-remote-"))
    made = Machines(folder)
    ssh = contextlib.ExitStack()
    try:
        port, node_port, ssh_port = free_ports(3)
        made.start(
            "superlink",
            *(*BRACT, "superlink", "--insecure", "--address", f"127.0.0.1:{port}"),
            *("--sockets", folder / "s"),
        )
        wait_for(
            lambda: sockets.is_healthy(folder / "s" / f"{port}.sock"),
            lambda: made.log("superlink").read_text(),
        )
        made.start(
            "site",
            *(real_command("flower-supernode"), "--insecure", "--port", str(node_port)),
            *("--superlink", f"127.0.0.1:{port}", "--node-config", "partition-id=0"),
        )
        # The socket on the operator's machine, in a folder of this user alone.
        tunnel = folder / "t"
        tunnel.mkdir(mode=0o700)
        login = None
        if ssh_server.available():
            login = ssh.enter_context(ssh_server.ssh_server(folder / "ssh", ssh_port))
            near, far = tunnel / f"{port}.sock", folder / "s" / f"{port}.sock"
            forwarding = subprocess.Popen([*login[:-1], "-N", "-L", f"{near}:{far}", login[-1]])
            ssh.callback(forwarding.terminate)
            wait_for(near.exists, lambda: (folder / "ssh" / "log").read_text())
        else:
            forward(tunnel / f"{port}.sock", folder / "s" / f"{port}.sock")
        app = made.operator / "theirs"
        for name, text in STRANGERS.items():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text)
        home = made.folder / "home-operator"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.there]\naddress = "{sockets.address(port)}"\ninsecure = true\n'
        )
        submitted = subprocess.run(
            [sys.executable, "-P", "-m", "bract.runtime.flower", "flwr", "run", str(app), "there"],
            cwd=made.operator,
            env=made.environment("operator") | {sockets.FOLDER: str(tunnel)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        number = re.search(r"started run (\d+)", submitted.stdout)
        assert number, submitted.stdout + submitted.stderr
        there = ("--superlink", tunnel / f"{port}.sock")
        followed = made.bract("follow", number[1], *there)
        assert followed.returncode == 0, (followed.stderr, made.log("superlink").read_text())
        captures = made.captured / f"run-{number[1]}" / "captures"
        assert len(list(captures.glob("round-0001/*/observation.json"))) == 1
        assert f"at the server, captures go to {captures}" in followed.stderr.splitlines()
        assert {path.name for path in made.server.iterdir()} == set()

        # bract's own app takes the same way, where the socket is said to lead elsewhere.
        done = made.bract("run", made.config(1, 1), *there, "--remote", "--format", "json")
        assert done.returncode == 0, done.stderr
        lies = Path(json.loads(done.stdout)["run"])
        assert lies.parent == made.captured
        if login is not None:
            through_ssh(made, login, str(lies))
        many = made.bract("run", made.config(3, 1), *there, "--remote")
        assert many.returncode == 2
        assert "clients is 3, and 1 SuperNodes are connected" in many.stderr
        port_only = made.bract(
            "run", made.config(1, 1), "--superlink", f"127.0.0.1:{port}", "--insecure"
        )
        assert port_only.returncode == 2
        assert "this port does not take runs" in port_only.stderr
    finally:
        ssh.close()
        end_processes(made.mark)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_superlink_that_is_killed_and_started_again_is_followed_on() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bract-remote-"))
    made = Machines(folder)
    try:
        port, node_port = free_ports(2)
        place = folder / "s" / f"{port}.sock"

        def superlink() -> subprocess.Popen[bytes]:
            process = made.start(
                "superlink",
                *(*BRACT, "superlink", "--insecure", "--external", "--sockets", folder / "s"),
                *("--address", f"127.0.0.1:{port}", "--database", folder / "state.db"),
            )
            wait_for(lambda: sockets.is_healthy(place), lambda: made.log("superlink").read_text())
            return process

        first = superlink()
        made.start("superexec", *BRACT, "superexec", "--sockets", folder / "s" / f"{port}.sock")
        made.start(
            "site",
            *(*BRACT, "supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"),
            *("--sockets", folder / "n", "--port", str(node_port)),
            *("--node-config", f'partition-id=0 state-dir="{folder}/state"'),
        )
        with made.log("run").open("wb") as log:
            running = subprocess.Popen(
                [*BRACT, "run", str(made.config(1, 3)), "--superlink", str(place), "--remote"],
                cwd=made.operator,
                env=made.environment("operator"),
                stderr=log,
            )
        wait_for(lambda: "round 1/3" in made.log("run").read_text(), made.log("run").read_text)
        first.kill()
        first.wait()
        wait_for(lambda: "asking again" in made.log("run").read_text(), made.log("run").read_text)
        superlink()
        assert running.wait(300) == 0, made.log("run").read_text()
        said = made.log("run").read_text()
        # Its beginning and its end, each once.
        assert [said.count(f"round {number}/3 begins") for number in (1, 2, 3)] == [1, 1, 1]
        assert [said.count(f"round {number}/3") for number in (1, 2, 3)] == [2, 2, 2]
    finally:
        end_processes(made.mark)
        shutil.rmtree(folder, ignore_errors=True)
