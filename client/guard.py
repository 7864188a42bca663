"""The guard of a site: attack an update before it leaves, strengthen it, or refuse.

The attacker is the site's own, in `bract.client.guard_attack`; a guard loads it alone.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from bract.client.answers import plain_name
from bract.client.guard_policy import GuardPolicy, Step
from bract.client.policy import PolicyError
from bract.disk import locked
from bract.disk.files import append_line
from bract.process import clock
from bract.process.clock import ProcessorClock
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)

ATTACKED = 0.85
"""Share of the guard's time that attacks are given; the rest is for what they overrun."""

USED = 0.97
"""Most of it that attacks use with what they overrun, as a rule."""

PROBED = 0.1
"""Seconds, or share of the time where that is less, that are spent to see how busy it is."""

LEAST = 0.05
"""Share of it below which no further attack begins."""

KEPT = 1.0 / 3.0
"""Share of the time left that a second look leaves to the next step, if there is one."""

STOPPED = "the guard of this site let no update leave"


@dataclass(frozen=True)
class Candidate:
    """An update as it would leave, and the examples that it comes from.

    Attributes
    ----------
    update, buffers
        As the server would hold them.
    examples, labels
        What was trained on, as `bract.inputs.Truth` holds it.
    batch_size
        Examples of a batch.
    """

    update: Tensors
    buffers: Tensors
    examples: Tensor
    labels: Tensor
    batch_size: int


@dataclass(frozen=True)
class Finding:
    """Finding of one attack of the guard; it stays at the site.

    Attributes
    ----------
    above
        Whether an example is above the limit.
    attack, score, value
        The attack that came nearest, and how near.
    seconds
        Time of the attack and its scoring, by the guard's clock.
    note
        Why there is no value, or what was decided without it.
    unfinished
        Whether it is above for lack of time alone.
    """

    above: bool
    attack: str = ""
    score: str = ""
    value: float | None = None
    seconds: float = 0.0
    note: str = ""
    unfinished: bool = False


class Inspect(Protocol):
    """Attack a candidate."""

    def __call__(self, candidate: Candidate, step: Step, seconds: float) -> Finding:
        """Return what an attack within so many seconds finds."""


@dataclass(frozen=True)
class Passed:
    """An update that the guard lets leave.

    Attributes
    ----------
    candidate
        The update.
    level
        Step of the ladder that was below the limit, 0 for the update as it is.
    step
        What leaves: that step, with those of the margin on top.
    margin
        How many these are.
    """

    candidate: Candidate
    level: int
    step: Step
    margin: int = 0

    @property
    def skipped(self) -> bool:
        """Return whether zeros are sent."""
        return self.step.skips


@dataclass
class Ladder:
    """Judge one update, and climb a policy's ladder until it is below the limit.

    Parameters
    ----------
    policy
        The site's.
    inspect
        Attacks a candidate.
    make
        Returns the candidate of a step; None where the step does not apply here.
    clock
        Makes the clock of one update, by which its seconds count.
    sleep
        Waits for wall seconds.
    """

    policy: GuardPolicy
    inspect: Inspect
    make: Callable[[Step], Candidate | None]
    clock: Callable[[], ProcessorClock] = ProcessorClock
    sleep: Callable[[float], None] = time.sleep
    findings: list[tuple[str, Finding]] = field(default_factory=list)

    def passed(self, level: int = 0) -> Passed | None:
        """Return what may leave; None where nothing may.

        It takes as long as all of the guard's seconds take here, in halves of them, whatever was
        found: time does not show the step, unless `make` trains anew for longer than that.

        Parameters
        ----------
        level
            Step of the ladder to begin with, 0 for the update as it is.
        """
        with self._in_time():
            return self._climbed(level)

    def _climbed(self, level: int) -> Passed | None:
        begun, steps = clock.now(), self.policy.steps
        for number, step in enumerate(steps):
            if number < min(level, self.policy.highest):
                continue
            candidate = self.make(step)
            if candidate is None:
                continue
            if step.skips:
                return Passed(candidate, number, step)
            if self._above(candidate, step, begun, last=number == self.policy.highest):
                continue
            passed = self._further(Passed(candidate, number, step))
            if not (passed.margin and self._read(passed, begun)):
                return passed
        return None

    def _further(self, passed: Passed) -> Passed:
        """Return what leaves with the margin, as far as it applies here."""
        for number, step in enumerate(self.policy.beyond(passed.level), start=1):
            candidate = self.make(step)
            if candidate is not None:
                passed = Passed(candidate, passed.level, step, number)
        return passed

    def _read(self, passed: Passed, begun: float) -> bool:
        """Return whether what leaves with the margin is read in the time that is left.

        Without time it leaves: what it is added to was below the limit.
        """
        left = self._left(begun)
        if left < LEAST * self.policy.seconds:
            return False
        found = self.inspect(passed.candidate, passed.step, left)
        self.findings.append((passed.step.name, found))
        return found.above and not found.unfinished

    def _left(self, begun: float) -> float:
        """Return the seconds that attacks have left."""
        return ATTACKED * self.policy.seconds - (clock.now() - begun)

    def _above(self, candidate: Candidate, step: Step, begun: float, *, last: bool) -> bool:
        """Attack with half of what is left of the time; if that reads nothing, with most of it.

        So does a look for which half was too short: a later step would take no less. The last step
        is given all in one look.
        """
        looks = 0
        for share in (1.0,) if last else (0.5, 1.0 - KEPT):
            left = self._left(begun)
            if left < LEAST * self.policy.seconds:
                if not looks:
                    self.findings.append((step.name, Finding(above=True, note="no time was left")))
                return not looks
            found = self.inspect(candidate, step, share * left)
            self.findings.append((step.name, found))
            if found.above and not found.unfinished:
                return True
            looks += not found.unfinished
        return not looks

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        taken, seconds = self.clock(), self.policy.seconds
        try:
            with clock.timed_by(taken):
                yield
        finally:
            while taken() < PROBED * min(1.0, seconds):
                pass
            busy = taken.wall() / taken()
            whole = max(1.0, math.ceil(2.0 * taken() / seconds) / 2.0)
            halves = math.ceil(2.0 * max(taken.wall() / seconds, USED * whole * busy))
            self.sleep(max(0.0, max(2, halves) * seconds / 2.0 - taken.wall()))


class Ledger(Protocol):
    """The site's record of what its guard did."""

    def guarding(self) -> AbstractContextManager[None]:
        """Let one update of the site at a time pass, so that runs share a bound."""

    def begin_guard(self) -> int:
        """Count the update as stopped, and as sent from a higher step, until it has passed.

        So a process that is ended counts.
        Returns the step to begin at: the run's own, the highest where the guard may not climb.
        """

    def end_guard(self, begun: int, ended: int, *, stopped: bool) -> None:
        """Note the step, and whether nothing of the data left; it settles what was counted."""


def send_or_refuse(
    ladder: Ladder, ledger: Ledger, about: dict[str, object], folder: Path | None, site: str
) -> Passed:
    """Run the guard, write down what it did, and return what leaves.

    Parameters
    ----------
    about
        Run and round, for the site's log.

    Raises
    ------
    PolicyError
        If nothing may leave; its text stays at the site.
    """
    passed = None
    with ledger.guarding():
        begun = ledger.begin_guard()
        try:
            passed = ladder.passed(begun)
        finally:
            level = len(ladder.policy.steps) - 1 if passed is None else passed.level
            ledger.end_guard(begun, level, stopped=passed is None or passed.skipped)
            _write_down(ladder, passed, about, folder, site)
    if passed is None:
        raise PolicyError(f"{STOPPED}: {ladder.findings[-1][1] if ladder.findings else 'no step'}")
    return passed


def _write_down(
    ladder: Ladder, passed: Passed | None, about: dict[str, object], folder: Path | None, site: str
) -> None:
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **about,
        "limit": ladder.policy.limit,
        "findings": [{"step": name, **asdict(found)} for name, found in ladder.findings],
        "sent": "nothing" if passed is None else passed.step.name,
        "margin": 0 if passed is None else passed.margin,
    }
    line = json.dumps(record, allow_nan=False)
    _log.info("guard: %s", line)
    if folder is not None:
        path = folder / f"{plain_name(site)}-guard.jsonl"
        with locked(path.with_name(f".{path.stem}.lock")):
            append_line(path, line, private=True)
