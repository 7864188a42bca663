"""One federation of a candidate: trained once, attacked, measured.

It is the unit of work that a search hands out, to this process or to others.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from bract.config import FederationConfig, build_config
from bract.disk import write_text
from bract.errors import BractError, RunFailedError, one_line
from bract.pool import Here, Lost, Note
from bract_harden.measure import measure
from bract_harden.records import Measure

_log = logging.getLogger(__name__)


class Federations(Protocol):
    """How a federation is trained and attacked."""

    def train(self, config: FederationConfig, root: Path) -> float | None:
        """Train it into a run directory; return CPU seconds of a round, None if not known."""

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        """Attack a run directory in all tiers that apply, with these keys of the audit section."""


@dataclass(frozen=True)
class Job:
    """A federation to train, unless it was, and to attack.

    Attributes
    ----------
    candidate
        Name of the candidate whose federation it is.
    config, seed
        The candidate's configuration, and the federation's seed beside it.
    run
        Its run directory.
    settings
        Keys of the audit section for the attack.
    floor
        It is not attacked where its accuracy is below; None attacks in any case.
    """

    candidate: str
    config: FederationConfig
    run: Path
    seed: int
    settings: dict[str, Any]
    floor: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a job: a measure, or an error in one line."""

    measure: Measure | None = None
    attacked: bool = False
    error: str | None = None
    cpu_seconds: float = 0.0


def outcome_of(found: Outcome | Lost) -> Outcome:
    """Return what came of a job, of a lost worker too.

    Raises
    ------
    RunFailedError
        If a worker returned anything else.
    """
    if isinstance(found, Lost):
        return Outcome(error=found.reason)
    if not isinstance(found, Outcome):
        raise RunFailedError(
            f"a worker handed back {type(found).__name__}, expected an outcome",
            code="worker-failed",
        )
    return found


def here(federations: Federations) -> Here[Job, Outcome]:
    """Return the pool that does one job after the other in this process."""
    return Here(partial(work, federations))


def work_there(federations: Federations, folder: Path, job: Job, note: Note) -> Outcome:
    """Do a job in a worker's process, in the folder that the search was started in."""
    os.chdir(folder)
    torch.set_num_threads(1)
    return work(federations, job, note)


def work(federations: Federations, job: Job, note: Note) -> Outcome:
    """Train, attack and measure one federation; an error costs this one alone."""
    del note
    begun = time.process_time()
    found, attacked, error = None, False, None
    try:
        seconds = _trained(federations, job)
        if job.floor is not None:
            found = measure(job.run, job.config, job.seed, seconds)
        if found is None or found.accuracy is None or found.accuracy >= (job.floor or 0.0):
            federations.attack(job.run, job.settings)
            found = measure(job.run, job.config, job.seed, seconds)
            attacked = True
    except Exception as caught:  # noqa: BLE001 - a candidate costs itself alone
        error = one_line(caught, 500) or type(caught).__name__
        if not isinstance(caught, BractError):
            error = f"{type(caught).__name__}: {error}"
            _log.debug("candidate %s", job.candidate, exc_info=True)
        found = None
    return Outcome(found, attacked, error, time.process_time() - begun)


def _trained(federations: Federations, job: Job) -> float | None:
    """Train from the start: what an interrupted search left half-made does not count."""
    timing = job.run.with_suffix(".json")
    if timing.is_file() and job.run.is_dir():
        kept: float | None = json.loads(timing.read_text())["seconds"]
        return kept
    shutil.rmtree(job.run, ignore_errors=True)
    seconds = federations.train(seeded(job.config, job.seed), job.run)
    write_text(timing, json.dumps({"seconds": seconds}))
    return seconds


def seeded(config: FederationConfig, seed: int) -> FederationConfig:
    """Return the federation of a further seed; 0 is the configuration's own."""
    content = config.model_dump(mode="json")
    content |= {"seed": (config.seed + seed) % 2**31, "truth": True}
    content["capture"]["store"] = None
    return build_config(content).as_own_word()
