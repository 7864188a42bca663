"""How many workers an audit is worth, and what is asked of Ray, without a Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from audited import audited_run
from fake_ray import FakeRay
from refusals import refused
from typer.testing import CliRunner

from bract.audit.audit import Audit
from bract.cli import audit_workers
from bract.cli.audit_workers import asked_for, count_for, workers_of
from bract.cli.launch import cluster
from bract.cli.launch.cluster import Asked, connected
from bract.cli.main import app
from bract.config.config import AuditRequest
from bract.rundir import RunDirectory

CHOICE = AuditRequest(attacks=["ig"], iterations=2, device="cpu", batch=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audited_run(tmp_path_factory.mktemp("made") / "run", uploads=3).root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(made, tmp_path / "run"))


def test_workers_are_placed_by_cores_and_shares_of_gpus() -> None:
    def placed(asked: Asked, **held: float) -> Any:
        ray = FakeRay()
        ray.held = held
        found = cluster._placed(ray, asked)
        return found.workers, found.device, found.gpus

    assert placed(Asked(), CPU=8) == (8, "cpu", 0.0)
    assert placed(Asked(threads=3), CPU=8) == (2, "cpu", 0.0)
    assert placed(Asked(), CPU=64, GPU=4) == (4, "cuda", 1.0)
    assert placed(Asked(gpus=0.1), CPU=64, GPU=4) == (40, "cuda", 0.1)
    assert placed(Asked(gpus=2), CPU=64, GPU=5) == (2, "cuda", 2.0)
    assert placed(Asked(gpus=0.5, workers=3), CPU=64, GPU=4) == (3, "cuda", 0.5)
    assert placed(Asked(device="cpu"), CPU=4, GPU=4) == (4, "cpu", 0.0)
    with refused("device-missing", "GPU"):
        placed(Asked(device="cuda"), CPU=4)
    with refused("device-missing", 1, 8, "GPUs"):
        placed(Asked(gpus=8), CPU=4, GPU=4)


def test_gpus_of_workers_go_with_ray() -> None:
    assert asked_for(None, AuditRequest(workers=2)) is None
    with refused("config-conflict", "audit.gpus", "--ray"):
        asked_for(None, AuditRequest(gpus=0.5))
    pytest.importorskip("ray")
    with refused("usage", "--device", "cuda:1", "--ray"):
        asked_for("auto", AuditRequest(device="cuda:1"))
    with refused("config-value", 1, "GPUs"):
        asked_for("auto", AuditRequest(gpus=1.5))


def test_without_ray_the_command_that_installs_it_is_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    with refused("package-missing", "--ray"):
        CliRunner().invoke(app, ["audit", str(run.root), "--ray", "auto"], catch_exceptions=False)


@pytest.mark.parametrize("address", ["there", "host:", "host:0", ":1", "host:99999", "ray://host"])
def test_what_is_no_address_is_refused(address: str) -> None:
    pytest.importorskip("ray")
    with (
        refused("usage", "auto", "HOST:PORT", "ray://HOST:PORT"),
        connected(Asked(address)),
    ):
        pass


def test_an_address_where_no_ray_answers_is_refused() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with (
            refused("ray-unreachable", f"127.0.0.1:{port}"),
            connected(Asked(f"127.0.0.1:{port}")),
        ):
            pass


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_an_address_where_something_else_answers_is_refused_at_once(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "PATIENCE", 0.5)

    def serve(listening: socket.socket) -> None:
        link, _ = listening.accept()
        with link, contextlib.suppress(OSError):
            link.recv(100)
            link.sendall(answer)
            link.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        with (
            refused("ray-unreachable", f"127.0.0.1:{port}"),
            connected(Asked(f"127.0.0.1:{port}")),
        ):
            pass


def test_what_speaks_grpc_is_taken_for_a_ray() -> None:
    grpc = pytest.importorskip("grpc")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        cluster._check_address(f"127.0.0.1:{port}")
        cluster._check_address(f"ray://127.0.0.1:{port}")
    finally:
        server.stop(None)


def test_processes_are_started_where_the_work_is_worth_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(**changes: Any) -> int:
        audit = Audit(run, CHOICE.model_copy(update={"iterations": 48_000} | changes))
        return count_for([audit])

    monkeypatch.setattr(audit_workers, "cores", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert count() == 3, "a process a batch"
    assert count(iterations=2) == 1
    assert count(iterations=2, workers=2) == 2
    assert count(workers=1) == 1
    assert count(attacks=["auto"], iterations=4, restarts=4) == 1
    assert count(batch=3) == 1
    assert count(batch=None) == 3, "a batch of three is divided"
    assert count(seconds=60.0) == 3
    assert count(iterations=None, total_seconds=600.0) == 1, "its attacks share one time"
    with monkeypatch.context() as patched:
        patched.setattr("torch.get_num_threads", lambda: 4)
        assert count() == 2
    full = psutil.virtual_memory()._replace(available=5 << 29)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    assert count() == 2, "a gigabyte each"


def test_one_process_is_this_one_and_removes_what_a_killed_audit_left(run: RunDirectory) -> None:
    left = run.root / ".workers" / "1" / "round-0001.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half an image")
    with workers_of([Audit(run, CHOICE)]) as workers:
        assert workers is None
        assert not (run.root / ".workers").exists()
