"""Hand the batches of an audit to workers, and collect their results."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bract.audit.audit import Audit
from bract.audit.results import Batch
from bract.audit.worker import Standing, Worker, few_threads
from bract.cli.console import say
from bract.cli.launch.cluster import (
    Asked,
    Cluster,
    check_ray,
    connected,
    raised_there,
    uninterrupted,
)
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError, one_line
from bract.plugins import PluginError
from bract.schema import Answer

ATTEMPTS = 3
"""How often a batch is begun, where the workers that had it were lost."""

POLL = 0.5
"""Seconds between two looks at how far the workers are."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Place:
    """One worker: its handle, the batch that it has, and its last reported progress."""

    handle: Any
    batch: Batch | None = None
    asked: Any = None
    standing: Standing = (0.0, math.inf)


class AuditPool(Protocol):
    """What attacks the batches of an audit in the place of this process.

    Attributes
    ----------
    device
        Kind of device that batches are planned for, ``cpu`` or ``cuda``.
    """

    device: str

    def execute(
        self, audit: Audit, batches: Sequence[Batch], show: Callable[[float, str], None]
    ) -> Iterator[Answer]:
        """Attack the batches; yield answers as batches are finished and checked.

        Parameters
        ----------
        show
            Called with the finished share of the work, in observations, and the lowest loss.

        Raises
        ------
        BractError
            If a worker cannot work on the run, or returns other results than were asked for.
        RunFailedError
            If a batch was lost `ATTEMPTS` times.
        """


class Workers:
    """Workers on a cluster that attack the batches of one run's audits.

    A worker that is lost costs the batch that it had: another one begins it again, `ATTEMPTS` times
    at most.

    Parameters
    ----------
    root
        The run; every machine of the cluster sees it at this path.
    threads
        Threads of one worker.
    """

    def __init__(self, cluster: Cluster, root: Path, threads: int) -> None:
        self.cluster, self.device = cluster, cluster.device
        self._ray = cluster.ray
        self._root, self._threads = root.absolute(), threads
        self._scratch = scratch_of(self._root)
        self._waiting: dict[Any, _Place] = {}
        self._idle: list[_Place] = []
        self._lost: Counter[Batch | None] = Counter()

    @contextlib.contextmanager
    def started(self) -> Iterator[Workers]:
        """Have workers while the block runs, as they are needed; none works on after it."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            yield self
        finally:
            for place in [*self._waiting.values(), *self._idle]:
                with contextlib.suppress(Exception):
                    self._ray.kill(place.handle)
            self._waiting, self._idle = {}, []
            shutil.rmtree(self._scratch, ignore_errors=True)

    def execute(
        self, audit: Audit, batches: Sequence[Batch], show: Callable[[float, str], None]
    ) -> Iterator[Answer]:
        """Attack the batches on all workers, as `AuditPool` says."""
        pending = deque(batches)
        request = portable(audit.request).model_copy(update={"device": self.device})
        while pending or any(place.batch for place in self._waiting.values()):
            self._start_workers(len(pending))
            while pending and self._idle:
                place = self._idle.pop()
                place.batch, place.standing = pending.popleft(), (0.0, math.inf)
                keys = [capture.key for capture in place.batch.captures]
                work = place.handle.attack
                found = work.remote(request, place.batch.attack, place.batch.repeat, keys)
                self._waiting[found] = place
            ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=POLL)
            for reference in ready:
                place = self._waiting.pop(reference)
                batch, place.batch = place.batch, None
                try:
                    returned = self._take(reference, batch)
                except PluginError as error:
                    _log.error("%s", error)
                    self._idle.append(place)
                    continue
                if returned is _LOST:
                    if batch is not None:
                        pending.appendleft(batch)
                    continue
                self._idle.append(place)
                if batch is not None:
                    yield from audit.accept(batch, _files(returned))
            self._look()
            busy = [place for place in self._waiting.values() if place.batch is not None]
            if busy:
                within = sum(p.standing[0] * len(p.batch.captures) for p in busy if p.batch)
                loss = min(place.standing[1] for place in busy)
                show(within, f"{len(busy)} workers, loss {loss:.4f}")

    def _start_workers(self, pending: int) -> None:
        """Start workers until there is one for each batch, or no more room."""
        while len(self._waiting) + len(self._idle) < self.cluster.workers:
            if (
                sum(1 for p in self._waiting.values() if p.batch is None) + len(self._idle)
                >= pending
            ):
                return
            kind = self._ray.remote(
                num_cpus=self._threads,
                num_gpus=self.cluster.gpus,
                max_restarts=0,
                max_concurrency=2,  # an attack, and a request for its progress
            )(Worker)
            handle = kind.remote(self._root, self._scratch, self._threads, [str(Path.cwd())])
            self._waiting[handle.host.remote()] = _Place(handle)

    def _take(self, reference: Any, batch: Batch | None) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise raised_there(error) from None
        except errors.RayError as error:
            self._lost[batch] += 1
            what = "before it had begun" if batch is None else f"with {named(batch)}"
            if self._lost[batch] >= ATTEMPTS:
                raise too_many_lost(what, one_line(error, 300)) from error
            _log.warning("a worker was lost %s; it is begun again", what)
            return _LOST

    def _look(self) -> None:
        """Ask the workers for their progress, and read earlier answers without waiting."""
        for place in self._waiting.values():
            if place.asked is not None:
                if not self._ray.wait([place.asked], timeout=0)[0]:
                    continue
                with contextlib.suppress(Exception):
                    share, loss = self._ray.get(place.asked)
                    if place.batch is not None and 0.0 <= share <= 1.0:
                        place.standing = (float(share), float(loss))
            place.asked = place.handle.standing.remote() if place.batch is not None else None


_LOST = object()


def _files(returned: object) -> dict[str, bytes]:
    """Return a worker's result: names and bytes, or nothing that can be used."""
    if not isinstance(returned, dict):
        raise BractError(
            f"a worker handed back {type(returned).__name__}, expected files", code="worker-failed"
        )
    return {k: v for k, v in returned.items() if type(k) is str and type(v) is bytes}


def too_many_lost(what: str, ending: str) -> RunFailedError:
    """Return the error of an audit whose workers end again and again."""
    return RunFailedError(
        f"{ATTEMPTS} workers were lost {what}: {ending}; is there enough memory for so many? "
        "audit.workers takes fewer, --resume goes on",
        code="worker-failed",
    )


def portable(request: AuditRequest) -> AuditRequest:
    """Return a request whose files are named whatever folder a worker is in."""
    files = {name: getattr(request, name) for name in ("key", "prior", "truth")}
    return request.model_copy(
        update={name: path and path.absolute() for name, path in files.items()}
    )


def scratch_of(root: Path) -> Path:
    """Return the folder for half-made results of an audit's workers."""
    return root / ".workers"


def named(batch: Batch) -> str:
    """Return an attack and the observations that it is on, in words."""
    keys = [capture.key for capture in batch.captures]
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{batch.attack} on {keys[0]}{more}"


def asked_for(address: str | None, request: AuditRequest) -> Asked | None:
    """Return which workers the command line asks for; None is this process alone.

    Raises
    ------
    BractError
        If Ray is not installed, or an option goes with ``--ray`` only.
    """
    if address is None:
        if request.gpus is not None:
            raise BractError(
                "audit.gpus goes with --ray; add --ray auto, or leave audit.gpus out",
                code="config-conflict",
            )
        return None
    check_ray("--ray")
    few_threads()
    threads = torch.get_num_threads()
    gpus = 1.0 if request.gpus is None else request.gpus
    return Asked(address, request.workers, gpus, request.device, threads)


@contextlib.contextmanager
def workers_of(asked: Asked, root: Path) -> Iterator[Workers]:
    """Have the workers that were asked for while the block runs.

    Raises
    ------
    BractError
        If they cannot be had.
    """
    with uninterrupted(), connected(asked) as cluster:
        say(f"workers: {cluster.workers} on {cluster.device}, threads each: {asked.threads}")
        with Workers(cluster, root, asked.threads).started() as workers:
            yield workers
