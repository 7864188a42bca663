"""The workers of an audit: how many it is worth, and where they are."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from bract.attacks import ATTACKS
from bract.attacks.base import SECONDS
from bract.audit.audit import Audit
from bract.audit.audit_pool import Attacking, AuditPool, scratch_of
from bract.audit.questions.reconstruction.plan import stored_bytes
from bract.audit.results import Batch
from bract.audit.worker import few_threads
from bract.cli.console import say
from bract.cli.launch.cluster import Asked, check_ray, connected, uninterrupted
from bract.config.config import AuditRequest
from bract.errors import BractError
from bract.pool import Processes, Ray, cores

WORTH = 30.0
"""Expected seconds of work from which processes are started that were not asked for: each spends
some seconds on its imports."""

MEMORY = 2**30
"""Memory that must be available for a process, in bytes, besides
`COPIES` of the uploads of its largest batch."""

COPIES = 20


def asked_for(address: str | None, request: AuditRequest) -> Asked | None:
    """Return which workers the command line asks for; None is this machine alone.

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
def workers_of(audits: Sequence[Audit], asked: Asked | None = None) -> Iterator[AuditPool | None]:
    """Have the workers of audits of one run while the block runs; None is this process alone.

    Parameters
    ----------
    asked
        Those of a Ray cluster. None takes processes of this machine: ``audit.workers`` says how
        many; by default as many as cores, where the work takes longer than they take to start, is
        not limited as a whole, and is not a GPU's.

    Raises
    ------
    BractError
        If those of a cluster cannot be had.
    """
    few_threads()
    root = audits[0].run.root.absolute()
    # An audit that was killed leaves half-made reconstructions, which are personal data.
    shutil.rmtree(scratch_of(root), ignore_errors=True)
    try:
        with _on_this_machine(audits, root) if asked is None else _on_a_cluster(asked, root) as own:
            yield own
    finally:
        shutil.rmtree(scratch_of(root), ignore_errors=True)


@contextlib.contextmanager
def _on_this_machine(audits: Sequence[Audit], root: Path) -> Iterator[AuditPool | None]:
    count = count_for(audits)
    if count < 2:
        yield None
        return
    with Processes(Attacking(root, torch.get_num_threads()), count) as pool:
        yield AuditPool(torch.device(audits[0].device).type, pool)


@contextlib.contextmanager
def _on_a_cluster(asked: Asked, root: Path) -> Iterator[AuditPool]:
    with uninterrupted(), connected(asked) as cluster:
        say(f"workers: {cluster.workers} on {cluster.device}, threads each: {asked.threads}")
        pool = Ray(
            cluster.ray,
            Attacking(root, asked.threads),
            workers=cluster.workers,
            threads=asked.threads,
            gpus=cluster.gpus,
            folders=[root],
        )
        with pool:
            yield AuditPool(cluster.device, pool)


def count_for(audits: Sequence[Audit]) -> int:
    """Return how many processes the audits are worth."""
    batches = [(a, b) for a in audits for b in a.plan() if b.question == "reconstruction"]
    if not batches:
        return 1
    one = audits[0].request
    most = len(batches)
    if one.batch is None:
        most = sum(len(batch.captures) for _, batch in batches)
    if one.workers is not None:
        return min(one.workers, most)
    if one.total_seconds is not None or audits[0].device != "cpu":
        return 1
    if sum(_expected(audit.request, batch) for audit, batch in batches) < WORTH:
        return 1
    largest = max(sum(map(stored_bytes, batch.captures)) for _, batch in batches)
    room = psutil.virtual_memory().available // (MEMORY + COPIES * largest)
    return max(1, min(cores() // torch.get_num_threads(), most, int(room)))


def _expected(request: AuditRequest, batch: Batch) -> float:
    """Return seconds that a batch takes by what is declared; a crude number."""
    attack = ATTACKS[batch.attack]
    each = request.seconds
    if each is None:
        each = SECONDS[attack.cost] * request.restarts
        if request.iterations is not None:
            # A choice among attacks has no number of its own.
            each *= request.iterations / (attack.iterations if attack.iterations > 1 else 1000)
    return each * len(batch.captures)
