"""How batches are handed to workers, and what is asked of Ray, without a Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import socket
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from audited import audited_run
from refusals import check_named, refused
from typer.testing import CliRunner

from bract.audit.audit import Audit
from bract.audit.worker import Worker
from bract.cli.audit_workers import ATTEMPTS, Workers, asked_for
from bract.cli.launch import cluster
from bract.cli.launch.cluster import Asked, Cluster, connected
from bract.cli.main import app
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError
from bract.rundir import RunDirectory
from bract.schema.record import RecordError

CHOICE = AuditRequest(attacks=["ig"], iterations=2, device="cpu", batch=1)


class LostError(Exception):
    """Stands for Ray's errors."""


class RaisedError(LostError):
    """Stands for what a worker raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay:
    """Answers in this process, one call after another; ``fail`` says which calls are lost."""

    exceptions = types.SimpleNamespace(RayError=LostError, RayTaskError=RaisedError)

    def __init__(self, fail: Callable[[str, int], Exception | None] = lambda *_: None) -> None:
        self.fail, self.calls, self.alive = fail, 0, 0
        self.held: dict[str, float] = {"CPU": 2.0}
        self.options: dict[str, Any] = {}

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options = options
        return lambda kind: types.SimpleNamespace(remote=lambda *a: self.start(kind(*a)))

    def start(self, worker: Any) -> Any:
        self.alive += 1

        def method(name: str) -> Any:
            return types.SimpleNamespace(
                remote=lambda *a: (name, lambda: getattr(worker, name)(*a))
            )

        return types.SimpleNamespace(**{n: method(n) for n in ("host", "standing", "attack")})

    def wait(self, references: list[Any], **_: Any) -> Any:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        name, call = reference
        if name != "standing":
            self.calls += 1
            if (error := self.fail(name, self.calls)) is not None:
                raise error
        return call()

    def kill(self, _handle: Any) -> None:
        self.alive -= 1

    def cluster_resources(self) -> dict[str, float]:
        return self.held


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audited_run(tmp_path_factory.mktemp("made") / "run", uploads=3).root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(made, tmp_path / "run"))


def pool_of(run: RunDirectory, ray: FakeRay, workers: int = 2) -> Workers:
    return Workers(Cluster(ray, "cpu", workers, 0.0), run.root, 1)


def audited(run: RunDirectory, ray: FakeRay) -> list[str]:
    audit = Audit(run, CHOICE, resume=True)
    with pool_of(run, ray).started() as pool:
        return [str(r.client) for r in pool.execute(audit, audit.plan(), lambda *_: None)]


def test_every_batch_is_attacked_once_by_as_many_workers_as_there_is_room_for(
    run: RunDirectory,
) -> None:
    ray = FakeRay()
    assert sorted(audited(run, ray)) == ["client-0", "client-1", "client-2"]
    assert ray.calls == 2 + 3
    assert ray.options["num_cpus"] == 1 and ray.options["max_restarts"] == 0
    assert not (run.root / ".workers").exists()


def test_a_worker_that_is_lost_costs_its_batch_and_no_other(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("bract").propagate = True
    lost = iter([True])
    ray = FakeRay(
        lambda name, _: LostError("killed") if name == "attack" and next(lost, 0) else None
    )
    assert sorted(audited(run, ray)) == ["client-0", "client-1", "client-2"]
    check_named(caplog.text, "round-0001/client-")
    assert ray.calls == 3 + 1 + 3


def test_a_batch_that_loses_every_worker_ends_the_audit_and_the_others_stay(
    run: RunDirectory,
) -> None:
    keys: list[str] = []

    class Killing(FakeRay):
        def get(self, reference: Any) -> Any:
            if reference[0] == "attack":
                keys.append("begun")
                if len(keys) > 1:
                    raise LostError("killed")
            return super().get(reference)

    with refused("worker-failed", ATTEMPTS, kind=RunFailedError):
        audited(run, Killing())
    assert len(keys) <= 1 + 2 * ATTEMPTS
    assert len(Audit(run, CHOICE, resume=True).results()) == 1
    assert len(Audit(run, CHOICE, resume=True).plan()) == 2


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (BractError("no such folder", code="usage"), BractError, "a worker: no such folder"),
        (RecordError("a.json", "no JSON"), RecordError, "a worker: a.json: half-written"),
        (KeyError("x"), RunFailedError, "a worker failed: KeyError"),
    ],
)
def test_what_a_worker_raises_ends_the_audit(
    run: RunDirectory, cause: Exception, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        audited(run, FakeRay(lambda name, _: RaisedError(cause) if name == "attack" else None))


def test_what_is_handed_back_is_checked(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("text", {"round-0001--client-0.json": "text"}, {1: b""}):
        monkeypatch.setattr(Worker, "attack", lambda *_, wrong=wrong: wrong)
        with refused("worker-failed"):
            audited(run, FakeRay())
    assert not run.audit.exists()


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
