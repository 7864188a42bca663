"""The audit of a run: ask its questions of what was captured, and keep the answers.

Every attacked observation leaves one JSON file and its pictures in ``audit/<attack>/``, of other
tiers than ``oblivious`` in ``audit/<attack>-<tier>/``. A file that is there is complete, and an
attack that runs keeps its state in ``unfinished/`` beside it, so an interrupted audit continues
where it stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from bract.attacks import Progress
from bract.audit.allowance import Allowance
from bract.audit.basis import Basis
from bract.audit.observations import Observations
from bract.audit.questions import QUESTIONS, Question
from bract.audit.results import Batch, Results
from bract.config.config import AuditRequest
from bract.errors import BractError
from bract.installed.plugins import PluginError, blaming
from bract.rundir import RunDirectory
from bract.schema import Answer, AuditResult

_log = logging.getLogger(__name__)


class Audit:
    """One audit of a run, in one tier.

    Parameters
    ----------
    run
        A finished or interrupted run.
    request
        What to ask and to attack. What is unknown or does not fit the run is an error, and nothing
        has been removed then.
    resume
        Skip observations that an earlier audit of the same settings has done, with the same
        versions and code, on the same capture and truth (`Basis`). Otherwise every
        chosen one is attacked, and its earlier results are removed when the first attack begins;
        those of other clients, rounds, attacks and tiers stay.
    output
        Folder of the results; None takes the run's ``audit/``.
    allowance
        The time that this audit shares with those of other tiers; None where there is none.
    like
        An audit of the same run in another tier: what both would make alike is made once.
    """

    def __init__(
        self,
        run: RunDirectory,
        request: AuditRequest,
        *,
        resume: bool = False,
        output: Path | None = None,
        allowance: Allowance | None = None,
        like: Audit | None = None,
    ) -> None:
        self.run, self.request, self.resume = run, request, resume
        self._seen = Observations(run, request, allowance)
        named = request.questions
        if named is None:
            named = [name for name in QUESTIONS if QUESTIONS[name].offered(self._seen)]
        kinds = sorted((QUESTIONS[n] for n in dict.fromkeys(named)), key=lambda kind: kind.position)
        basis = Basis(self._seen)
        files = Results(
            output or run.audit,
            request.tier,
            request.over_rounds,
            request.observer,
            basis.state,
        )
        self.questions: dict[str, Question[Answer]] = {
            kind.name: kind(self._seen, files, basis) for kind in kinds
        }
        for name, question in self.questions.items():
            if like is not None and name in like.questions:
                question.share(like.questions[name])
        self.device = str(self._seen.device)
        self._begun: set[str] = set()
        self._left = 0

    @property
    def seconds(self) -> float | None:
        """Wall time of the next attack on one observation, as far as time is a limit."""
        return self._seen.seconds

    @property
    def attacks(self) -> int:
        """Attacks on single observations, done or not."""
        request = self.request
        return len(self._seen.chosen) * len(request.attacks) * request.repeats

    def plan(self, device: str | None = None) -> list[Batch]:
        """Return the work to be done, with ``resume`` without what is done.

        ``device`` is the kind, ``cpu`` or ``cuda``, that the batches are for; None takes this
        audit's own.
        """
        kind = device or self._seen.device.type
        found = [
            batch
            for question in self.questions.values()
            for batch in question.plan(kind, resume=self.resume)
        ]
        if self.resume:
            self._left = sum(len(batch.captures) for batch in found)
        return found

    def batch(self, attack: str, repeat: int, keys: Collection[str]) -> Batch:
        """Return a batch that another audit planned, by the keys of its observations."""
        found = {capture.key: capture for capture in self._seen.chosen}
        if missing := sorted(set(keys) - found.keys()):
            raise BractError(
                f"{self.run.captures}: {missing[0]} is not among the captures here",
                code="captures-none",
            )
        return Batch("reconstruction", attack, repeat, tuple(found[key] for key in keys))

    def question(self, batch: Batch) -> Question[Answer]:
        """Return the question that a batch is for."""
        return self.questions[batch.question]

    def begin(self, batches: Iterable[Batch]) -> None:
        """Remove what the batches replace, once a question; before workers are handed them."""
        for batch in batches:
            self._begin(batch)

    def execute(
        self, batches: Iterable[Batch], progress: Callable[[Progress], None] | None = None
    ) -> Iterator[Answer]:
        """Run the batches; yield each answer as soon as it is written."""
        allowance, tier = self._seen.allowance, self.request.tier
        for batch in batches:
            if allowance is not None:
                allowance.open(tier, self._left or self.attacks)
                need = self.question(batch).needs_seconds(batch.attack)
                allowance.begin(tier, need=need, together=len(batch.captures))
            begun = time.monotonic()
            try:
                with blaming(type(self.question(batch))):
                    self._begin(batch)
                    yield from self.question(batch).execute(batch, progress)
            except PluginError as error:
                _log.error("%s", error)
            if allowance is not None:
                allowance.finish(len(batch.captures), time.monotonic() - begun)

    def accept(self, batch: Batch, returned: Mapping[str, bytes]) -> list[Answer]:
        """Check the files that a worker made of a batch, and keep them as `execute` does.

        Nothing of the batch is kept if any is not what this audit would have written itself, but
        for what was found.

        Parameters
        ----------
        returned
            Contents by the file's name: one JSON file an observation, and the pictures it names.
        """
        return self.question(batch).accept(batch, returned)

    def answers(self) -> list[Answer]:
        """Read the answers about the chosen observations, by this audit or earlier ones."""
        return [answer for question in self.questions.values() for answer in question.answers()]

    def results(self) -> list[AuditResult]:
        """Return the answers that are reconstructions."""
        known = self.questions.get("reconstruction")
        return [] if known is None else [cast(AuditResult, found) for found in known.answers()]

    def _begin(self, batch: Batch) -> None:
        if batch.question not in self._begun:
            self._begun.add(batch.question)
            self.question(batch).begin(resume=self.resume)
