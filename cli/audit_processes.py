"""Attack the batches of an audit in several processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch

from bract.attacks import ATTACKS
from bract.attacks.base import SECONDS
from bract.audit.audit import Audit
from bract.audit.questions.reconstruction.plan import stored_bytes
from bract.audit.results import Batch
from bract.audit.worker import Standing, Worker, few_threads
from bract.child_processes import ChildProcesses, Lost, Note, cores
from bract.cli.audit_workers import ATTEMPTS, named, portable, scratch_of, too_many_lost
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError, one_line
from bract.plugins import PluginError
from bract.schema import Answer

WORTH = 30.0
"""Expected seconds of work from which processes are started that were not asked for: each spends
some seconds on its imports."""

MEMORY = 2**30
"""Memory that must be available for a process, in bytes, besides
`COPIES` of the uploads of its largest batch."""

COPIES = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Job:
    request: AuditRequest
    attack: str
    repeat: int
    keys: tuple[str, ...]


@dataclass(frozen=True)
class _Failed:
    error: BractError


@dataclass
class _Attacking:
    """What a child does with a job; its worker, with the audits that it has opened, stays."""

    root: Path
    threads: int
    _worker: Worker | None = field(default=None, init=False)

    def __call__(self, job: _Job, note: Note) -> dict[str, bytes] | _Failed:
        if self._worker is None:
            self._worker = Worker(self.root, scratch_of(self.root), self.threads)
        try:
            return self._worker.attack(job.request, job.attack, job.repeat, job.keys, note)
        except BractError as error:
            return _Failed(error)
        except Exception as error:  # noqa: BLE001 - the child goes on, the audit ends
            return _Failed(
                RunFailedError(
                    f"a worker failed: {one_line(repr(error), 500)}", code="worker-failed"
                )
            )


class Processes:
    """Child processes that attack the batches of one run's audits.

    A process that dies costs the batch that it had; another one begins it again, `ATTEMPTS` times
    at most.

    Parameters
    ----------
    device
        Kind of device that the batches are for.
    count
        Number of processes.
    """

    def __init__(
        self,
        device: str,
        count: int,
        children: ChildProcesses[_Job, dict[str, bytes] | _Failed],
    ) -> None:
        self.device = device
        self._count, self._children = count, children

    def execute(
        self, audit: Audit, batches: Sequence[Batch], show: Callable[[float, str], None]
    ) -> Iterator[Answer]:
        """Attack the batches in all processes, as `AuditPool` says."""
        request = portable(audit.request)
        if request.batch is None:
            batches = spread(batches, self._count)
        jobs = {
            _Job(request, b.attack, b.repeat, tuple(c.key for c in b.captures)): b for b in batches
        }
        lost: Counter[_Job] = Counter()
        standing: dict[_Job, Standing] = {}

        def noted(job: _Job, what: object) -> None:
            assert isinstance(what, tuple)
            standing[job] = what
            within = sum(s[0] * len(j.keys) for j, s in standing.items())
            loss = min((s[1] for s in standing.values()), default=math.inf)
            show(within, f"{len(standing)} workers, loss {loss:.4f}")

        waiting: Iterable[_Job] = jobs
        while waiting:
            again: list[_Job] = []
            for job, outcome in self._children.run(waiting, noted):
                standing.pop(job, None)
                batch = jobs[job]
                if isinstance(outcome, Lost):
                    lost[job] += 1
                    if lost[job] >= ATTEMPTS:
                        raise too_many_lost(f"with {named(batch)}", outcome.ending)
                    _log.warning("a worker was lost with %s: begun again", named(batch))
                    again.append(job)
                elif isinstance(outcome, _Failed) and isinstance(outcome.error, PluginError):
                    _log.error("%s", outcome.error)
                elif isinstance(outcome, _Failed):
                    raise outcome.error
                else:
                    yield from audit.accept(batch, outcome)
            waiting = again


@contextlib.contextmanager
def processes_of(audits: Sequence[Audit]) -> Iterator[Processes | None]:
    """Have the processes that the audits are worth while the block runs; None is this one alone.

    ``audit.workers`` says how many; by default as many as cores, where the work takes longer than
    they take to start, is not limited as a whole, and is not a GPU's.
    """
    few_threads()
    count, root = count_for(audits), audits[0].run.root.absolute()
    # An audit that was killed leaves half-made reconstructions, which are personal data.
    shutil.rmtree(scratch_of(root), ignore_errors=True)
    if count < 2:
        yield None
        return
    threads = torch.get_num_threads()
    try:
        with ChildProcesses(_Attacking(root, threads), count) as children:
            yield Processes(torch.device(audits[0].device).type, count, children)
    finally:
        shutil.rmtree(scratch_of(root), ignore_errors=True)


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


def spread(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Halve the largest of fewer batches than ``count`` until each process has one."""
    found = list(batches)
    while found and len(found) < count:
        largest = max(found, key=lambda batch: len(batch.captures))
        half = len(largest.captures) // 2
        if not half:
            break
        i, all_of_it = found.index(largest), largest.captures
        found[i : i + 1] = [
            replace(largest, captures=part) for part in (all_of_it[:half], all_of_it[half:])
        ]
    return found


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
