"""Attack the batches of an audit in a pool of workers, and collect their results."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bract.audit.audit import Audit
from bract.audit.results import Batch
from bract.audit.worker import Standing, Worker
from bract.config.config import AuditRequest
from bract.errors import BractError, RunFailedError, one_line
from bract.installed.plugins import PluginError
from bract.pool import Lost, Note, Pool
from bract.schema import Answer

ATTEMPTS = 3
"""How often a batch is begun, where the workers that had it were lost."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Job:
    """A batch to attack: its request, attack and repeat, and the keys of its observations."""

    request: AuditRequest
    attack: str
    repeat: int
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """The outcome of a job that ended with an error."""

    error: BractError


@dataclass
class Attacking:
    """Attacks one run's batches, with the audits that it has opened.

    Parameters
    ----------
    root
        The run, at an absolute path that a worker's machine sees too.
    threads
        Threads of PyTorch in a worker.
    """

    root: Path
    threads: int
    _worker: Worker | None = field(default=None, init=False)

    def __call__(self, job: Job, note: Note) -> dict[str, bytes] | Failed:
        """Return the contents of the files of results by their names, or the error."""
        if self._worker is None:
            self._worker = Worker(self.root, scratch_of(self.root), self.threads)
        try:
            return self._worker.attack(job.request, job.attack, job.repeat, job.keys, note)
        except BractError as error:
            return Failed(error)
        except Exception as error:  # noqa: BLE001 - the worker goes on, the audit ends
            return Failed(
                RunFailedError(
                    f"a worker failed: {type(error).__name__}: {one_line(error, 500)}",
                    code="worker-failed",
                )
            )


class AuditPool:
    """Attacks the batches of one run's audits in a pool.

    A worker that is lost costs the batch that it had; another one begins it again, `ATTEMPTS` times
    at most.

    Parameters
    ----------
    device
        Kind of device that batches are planned for, ``cpu`` or ``cuda``.
    """

    def __init__(self, device: str, pool: Pool[Job, dict[str, bytes] | Failed]) -> None:
        self.device, self._pool = device, pool

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
        request = _portable(audit.request).model_copy(update={"device": self._device_of(audit)})
        if request.batch is None:
            batches = spread(batches, self._pool.workers)
        jobs = {
            Job(request, b.attack, b.repeat, tuple(c.key for c in b.captures)): b for b in batches
        }
        lost: Counter[Job] = Counter()
        standing: dict[Job, Standing] = {}

        def noted(job: Job, what: object) -> None:
            assert isinstance(what, tuple)
            standing[job] = what
            within = sum(s[0] * len(j.keys) for j, s in standing.items())
            loss = min((s[1] for s in standing.values()), default=math.inf)
            show(within, f"{len(standing)} workers, loss {loss:.4f}")

        waiting: Iterable[Job] = jobs
        while waiting:
            again: list[Job] = []
            for job, outcome in self._pool.run(waiting, noted):
                standing.pop(job, None)
                batch = jobs[job]
                if isinstance(outcome, Lost):
                    lost[job] += 1
                    if lost[job] >= ATTEMPTS:
                        raise _too_many_lost(batch, outcome.reason)
                    _log.warning("a worker was lost with %s; it is begun again", _named(batch))
                    again.append(job)
                else:
                    yield from _accepted(audit, batch, outcome)
            waiting = again

    def _device_of(self, audit: Audit) -> str:
        """Return the request's own device where it is of the pool's kind."""
        own = audit.request.device
        return own if own.partition(":")[0] in ("auto", self.device) else self.device


def _accepted(audit: Audit, batch: Batch, outcome: dict[str, bytes] | Failed) -> Iterator[Answer]:
    """Check and keep a batch's results; a plug-in's error costs its batch alone."""
    if isinstance(outcome, Failed):
        if not isinstance(outcome.error, PluginError):
            raise outcome.error
        _log.error("%s", outcome.error)
        return
    if not isinstance(outcome, dict):
        raise BractError(
            f"a worker handed back {type(outcome).__name__}, expected files", code="worker-failed"
        )
    files = {k: v for k, v in outcome.items() if type(k) is str and type(v) is bytes}
    yield from audit.accept(batch, files)


def spread(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Halve the largest of fewer batches than ``count`` until each worker has one."""
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


def scratch_of(root: Path) -> Path:
    """Return the folder for half-made results of an audit's workers."""
    return root / ".workers"


def _portable(request: AuditRequest) -> AuditRequest:
    """Return a request whose files are named whatever folder a worker is in."""
    files = {name: getattr(request, name) for name in ("key", "prior", "truth")}
    return request.model_copy(
        update={name: path and path.absolute() for name, path in files.items()}
    )


def _too_many_lost(batch: Batch, reason: str) -> RunFailedError:
    return RunFailedError(
        f"{ATTEMPTS} workers were lost with {_named(batch)}: {reason}; is there enough memory for "
        "so many? audit.workers takes fewer, --resume goes on",
        code="worker-failed",
    )


def _named(batch: Batch) -> str:
    """Return an attack and the observations that it is on, in words."""
    keys = [capture.key for capture in batch.captures]
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{batch.attack} on {keys[0]}{more}"
