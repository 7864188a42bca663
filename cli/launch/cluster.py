"""Ray for an audit or a search: a given cluster, or this machine's own while it lasts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bract.cli import signals
from bract.cli.launch.processes import Processes
from bract.cli.launch.reaper import MARK
from bract.errors import BractError, one_line
from bract.runtime.private_ray import private_ray

AUTO = "auto"
EXTRA = "simulation"
"""The extra of this package that brings Ray."""

PATIENCE = 5.0
"""Seconds for which a cluster's address is tried."""

_SETTINGS = b"\x04"
"""Type of a server's first frame of HTTP/2, in its fourth byte (RFC 9113, 3.4)."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00" + _SETTINGS + bytes(5)
"""A client's preface with an empty frame of settings."""

STORE_BYTES = 100 * 2**20
"""Memory of this machine's own Ray for what is handed on: results are small."""


@dataclass(frozen=True)
class Asked:
    """Which workers were asked for.

    Attributes
    ----------
    address
        ``HOST:PORT`` or ``ray://HOST:PORT`` of a cluster; ``auto`` is the one that RAY_ADDRESS
        names, or this machine alone.
    workers
        Most workers; None takes as many as there are cores or GPUs.
    gpus
        GPUs of one worker, such as 0.5.
    device
        ``auto``, ``cpu`` or ``cuda``.
    threads
        Threads of one worker.
    """

    address: str = AUTO
    workers: int | None = None
    gpus: float = 1.0
    device: str = "auto"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise BractError(
                f"--device {self.device} with --ray: Ray gives its workers their GPUs; "
                "say auto, cpu or cuda",
                code="usage",
            )
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise BractError(
                f"audit.gpus {self.gpus}: above 1, Ray gives whole GPUs", code="config-value"
            )


@dataclass(frozen=True)
class Cluster:
    """A Ray that answers.

    Attributes
    ----------
    ray
        The module.
    device
        Kind of every worker's device, ``cpu`` or ``cuda``.
    workers
        How many there is room for, at least one.
    gpus
        GPUs of one worker; 0 on ``cpu``.
    """

    ray: Any
    device: str
    workers: int
    gpus: float


def check_ray(what: str) -> None:
    """Refuse what needs Ray where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise BractError(
            f"{what} needs Ray, which is not installed; pip install 'bract[{EXTRA}]'",
            code="package-missing",
        )


@contextlib.contextmanager
def connected(asked: Asked) -> Iterator[Cluster]:
    """Have workers' machines while the block runs; what was started for it ends with it."""
    check_ray("--ray")
    address = asked.address
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS", "local")
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if address == "local":
            options = stack.enter_context(_own_machine(asked))
        else:
            _check_address(address)
        ray: Any = importlib.import_module("ray")
        try:
            stack.callback(ray.shutdown)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise BractError(
                f"--ray {asked.address}: no Ray answers there: {one_line(error, 300)}; HOST:PORT "
                "is an address of the cluster that this machine belongs to, ray://HOST:10001 of "
                "another one, and both need the Ray version and the token of this machine",
                code="ray-unreachable",
            ) from error
        finally:
            # Ray takes SIGTERM for itself.
            signals.listen()
        yield _placed(ray, asked)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """End as a signal asks, also where Ray's compiled code turns it into another error."""
    try:
        yield
    except SystemError:
        signals.check()
        raise


@contextlib.contextmanager
def _own_machine(asked: Asked) -> Iterator[dict[str, Any]]:
    """Give the options of a Ray of this command's own, which the reaper ends in any case."""
    processes = Processes(None, threads=asked.threads, fork_server=False, simulate=True)
    try:
        processes.begin()
        mark = processes.environment("ray")[MARK]
        with _environment({MARK: mark, **private_ray(processes.folder)}):
            cores = max(asked.threads, (asked.workers or 0) * asked.threads, os.cpu_count() or 1)
            yield {
                "num_cpus": cores,
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
            }
    finally:
        processes.end()


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_address(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BractError(
            f"--ray {one_line(address, 100)}: expected auto, HOST:PORT or ray://HOST:PORT",
            code="usage",
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as link:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                _check_greeting(link)
    except OSError as error:
        raise BractError(
            f"--ray {one_line(address, 100)}: no Ray answers there ({one_line(error, 200)}); "
            "start the cluster with `ray start --head`, or let --ray auto take this machine alone",
            code="ray-unreachable",
        ) from error


def _check_greeting(link: socket.socket) -> None:
    """Refuse what does not speak HTTP/2, as gRPC does: Ray itself tries that for two minutes."""
    link.settimeout(PATIENCE)
    link.sendall(_PREFACE)
    greeting = b""
    while len(greeting) < 4 and (more := link.recv(4 - len(greeting))):
        greeting += more
    if greeting[3:] != _SETTINGS:
        raise OSError("what listens there does not speak gRPC")


def _placed(ray: Any, asked: Asked) -> Cluster:
    """Count the workers for whom there is room."""
    held = ray.cluster_resources()
    cores, gpus = float(held.get("CPU", 0)), float(held.get("GPU", 0))
    if asked.device == "cuda" and not gpus:
        raise BractError(
            "--device cuda with --ray: no machine of the cluster offers a GPU to Ray",
            code="device-missing",
        )
    room = int(cores // asked.threads)
    share = 0.0
    if gpus and asked.device != "cpu":
        share = asked.gpus
        each = int(gpus) * int(1 / share + 1e-9) if share <= 1 else int(gpus // share)
        room = min(room, each)
    if asked.workers is not None:
        room = min(room, asked.workers)
    if room < 1:
        raise BractError(
            f"--ray {asked.address}: a worker takes {asked.threads} cores and {share:g} GPUs, the "
            f"cluster has {cores:g} and {gpus:g}",
            code="device-missing",
        )
    return Cluster(ray, "cuda" if share else "cpu", room, share)
