"""Other users of the machine read nothing of a run, a kit or a key, under the umask 0000."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from modes import open_to_others, reached_by_others
from test_processes import Command
from typer.testing import CliRunner

from bract.cli.main import app
from bract.runtime import sockets
from bract.runtime.serving import FORK_SOCKET

NOTHING_MASKED = ("sh", "-c", 'umask 0; exec "$0" "$@"')

PLAIN = """
name: plain
truth: true
clients: 2
rounds: 2
model: {name: lenet-strided, activation: relu}
training: {lr: 0.1, local_steps: 2}
data: {image_size: 16, partition: {kind: sizes, sizes: [40, 2]}}
defenses: [adadefense]
audit: {live_every: 1}
"""

ENCRYPTED = """
name: encrypted
clients: 3
rounds: 1
model: {name: lenet-strided, activation: relu}
training: {lr: 0.1, local_steps: 2}
data: {image_size: 16, partition: {kind: sizes, sizes: [40, 40, 2]}}
encryption: {scheme: paillier, threshold: 2}
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="b-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def nothing_masked() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def watched(folder: Path, temporary: Path, *arguments: str, **environment: str) -> set[str]:
    """Run a command; return what others could read of its files, also of those that it removed."""
    command = Command(
        folder, *arguments, before=NOTHING_MASKED, TMPDIR=str(temporary), **environment
    )
    found: set[str] = set()
    while command.process.poll() is None:
        found.update(looked_at(open_to_others, folder), looked_at(reached_by_others, temporary))
        time.sleep(0.05)
    code, errors = command.finish()
    assert code == 0, errors
    return found | set(open_to_others(folder))


def looked_at(look: Callable[[Path], list[str]], place: Path) -> list[str]:
    try:
        return look(place)
    except FileNotFoundError:  # removed while it was looked at
        return []


def write_config(folder: Path, text: str) -> None:
    (folder / "x.yaml").write_text(text)
    (folder / "x.yaml").chmod(0o600)


@pytest.mark.processes
def test_nothing_that_a_run_writes_is_readable_by_others(tmp_path: Path, temporary: Path) -> None:
    write_config(tmp_path, PLAIN)
    assert watched(tmp_path, temporary, "run", "x.yaml", "--profile") == set()
    run = tmp_path / "runs" / "plain"
    names = {path.name for path in run.rglob("*")}
    assert {"truth", "state", "superlink.log", "live-audit.log", "profile.json"} <= names
    budget = ("--attack", "ig", "--budget", "2", "--clients", "client-1")
    for line in (
        ("audit", str(run), *budget),
        ("report", str(run)),
        ("export", str(run), "--to", "tensorboard"),
        ("export", str(run), "--to", "mlflow"),
        ("pack", str(run), "--out", str(tmp_path / "x.tar")),
        ("pull", str(tmp_path / "x.tar"), "--out", str(tmp_path / "pulled")),
    ):
        assert watched(tmp_path, temporary, *line, MLFLOW_DISABLE_TELEMETRY="true") == set(), line
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"report.html", "tensorboard", "mlflow.db", "pulled"} <= names


@pytest.mark.processes
def test_nothing_that_an_encrypted_simulated_run_writes_is_readable_by_others(
    tmp_path: Path, temporary: Path
) -> None:
    pytest.importorskip("ray")
    write_config(tmp_path, ENCRYPTED)
    assert watched(tmp_path, temporary, "run", "x.yaml", "--simulate") == set()
    names = {path.name for path in (tmp_path / "runs").rglob("*")}
    assert {"share-0.pem", "public.pem", "aggregates"} <= names


@pytest.mark.processes
def test_the_database_of_a_superlink_is_its_owners_alone(tmp_path: Path, temporary: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = Command(
        temporary,
        *("superlink", "--insecure", "--address", f"127.0.0.1:{port}"),
        *("--sockets", "s", "--database", "state.db"),
        before=NOTHING_MASKED,
        HOME=str(temporary / "home"),
    )
    try:
        deadline = time.monotonic() + 120
        while not sockets.is_healthy(temporary / "s" / f"{port}.sock"):
            assert command.process.poll() is None, command.finish()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert (temporary / "state.db").is_file()
        assert open_to_others(temporary) == []
    finally:
        command.process.terminate()
        command.process.wait()
    assert command.nothing_is_left()


@pytest.mark.processes
def test_a_fork_server_and_what_it_starts_mask_what_they_write(
    tmp_path: Path, temporary: Path
) -> None:
    place = temporary / FORK_SOCKET
    server = Command(
        tmp_path, str(place), module="bract.runtime.fork_server", before=NOTHING_MASKED
    )
    try:
        while not place.exists():
            assert server.process.poll() is None, server.finish()
            time.sleep(0.1)
        assert open_to_others(temporary) == []
    finally:
        server.process.kill()
        server.process.wait()


FEDERATION = """
name: hospitals
clients: 2
rounds: 1
encryption: paillier
deployment: {server: 127.0.0.1, port: 9443, sites: [a, b]}
"""


def bract(*arguments: str) -> None:
    """Run a command in this process, without what its entry point masks for all of them."""
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output


@pytest.mark.usefixtures("nothing_masked")
def test_kits_keys_and_priors_are_their_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, FEDERATION)
    bract("provision", "x.yaml", "--out", "deep/kits")
    bract("keygen", "deep/keys/of", "--threshold", "2", "--clients", "3")
    bract("keygen", "deep/identity", "--identity")
    bract("init", "deep/federation.yaml")
    small = ("--size", "16", "--epochs", "1", "--set", "width=2")
    bract("prior", "train", "--data", "digits", *small, "--out", "deep/p.safetensors")
    assert {"start.sh", "share-0.pem", "identity.pem", "p.safetensors"} <= {
        path.name for path in tmp_path.rglob("*")
    }
    assert open_to_others(tmp_path) == []
