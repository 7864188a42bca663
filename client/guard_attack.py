"""The attacker of a site's guard: the one place where a client attacks.

Readings and closed forms come first, then the attacks that match, in the adaptive tier of the
update's own defenses. The site knows the truth, so each trial is scored, and the nearest counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bract.attacks import ATTACKS, Budget, Case, Engine, Reconstruction, Refusal, attack
from bract.attacks.base import Attacker
from bract.attacks.registry import closed_forms
from bract.attacks.result import CutOffError, SeedBudget, Trial
from bract.attacks.solve.cutting import cut_off_after
from bract.attacks.task import AttackTask, open_cases
from bract.captures.observation import Observation
from bract.client.guard import Candidate, Finding
from bract.client.guard_policy import LOWER_IS_NEARER, GuardPolicy, Step
from bract.config.audit import Tier
from bract.inputs import Truth, input_of
from bract.models.losses import loss_of
from bract.process import clock
from bract.schema import AuditResult, ClientDeclaration
from bract.schema.audit import ImageResult, Scores
from bract.scores import LeakRule, ScoredImages, Scorer, scorer_of

LATE = 0.1
"""Share of its time by which an attack may overrun before it is cut off."""

FINISHED = 0.9
"""Share of its time after which a closed form counts as cut off: it stops by its own clock."""

READING_SHARE = 0.7
"""Most of the time that closed forms take together; the rest is the search's."""


@dataclass
class Inspection:
    """Attack candidates of one update, and hold them against the limit.

    Parameters
    ----------
    policy
        Limit and time.
    sent
        What the server sent and declares, without update and defenses.
    known
        Examples of the site, by which the leak rule tells a copy from chance.
    defenses
        The run's own, as they are declared.
    """

    policy: GuardPolicy
    sent: Observation
    known: Truth
    defenses: Sequence[dict[str, object]]
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._kind = input_of(self.sent.declaration)
        self._all = self._kind.kept_references(
            [self._read(self.known.images, self.known.labels)], self.seed
        )
        # Secrets of a step come from a cipher: no search of seeds finds them.
        self._budget = Budget(weak_seeds=SeedBudget(candidates=0))
        self._task = AttackTask(seed=self.seed, engine=Engine(device=self.device))
        self._finished: tuple[Candidate | None, dict[tuple[str, Tier], bool]] = (None, {})

    def __call__(self, candidate: Candidate, step: Step, seconds: float) -> Finding:
        """Return what an attack within so many seconds finds; one that cannot look is above.

        Closed forms that were done with the same candidate before have read nothing in it, and are
        not run again; where one of them looked, the candidate was looked at.
        """
        begun = clock.now()
        truth = self._read(candidate.examples, candidate.labels)
        found = _Nearest(self.policy, self.sent.declaration, self._scorer(truth), truth)
        observed = self._observed(candidate, step)
        if self._finished[0] is not candidate:
            self._finished = (candidate, {})
        tiers: tuple[Tier, ...] = ("adaptive", "oblivious")
        for tier in tiers[: 1 + bool(observed.declaration.defenses)]:
            if not found.looked and not found.above:
                self._attack(observed, tier, begun + seconds, found)
        return replace(found.finding(), seconds=clock.now() - begun)

    def _read(self, examples: Tensor, labels: Tensor) -> Truth:
        kept = {"images": examples, "labels": labels}
        return self._kind.read(kept, self.sent.declaration)

    def _scorer(self, truth: Truth) -> Scorer:
        left = None if self._all is None else self._all.without(truth)
        scorer = scorer_of(self._kind, left)
        scorer.perceptual = False
        return scorer

    def _attack(self, observed: Observation, tier: Tier, end: float, found: _Nearest) -> None:
        """Try readings, and then searches, until an example is above the limit."""
        left = end - clock.now()
        budget = replace(self._budget, seconds=max(left, 0.01))
        (case,), task = open_cases(
            [observed], replace(self._task, tier=tier, budget=budget), attack="auto"
        )
        if isinstance(case, Refusal):
            found.refused.append(case.reason)
            return
        readings, searches = self._methods(case)
        until = clock.now() + READING_SHARE * (end - clock.now())
        for method in readings:
            if (method.name, tier) not in self._finished[1]:
                self._run(method, case, task, until, found)
            elif self._finished[1][method.name, tier]:
                found.looked = True
        for number, method in enumerate(searches):
            share = (end - clock.now()) / (len(searches) - number)
            self._run(method, case, task, clock.now() + share, found)

    def _run(
        self, method: Attacker, case: Case, task: AttackTask, until: float, found: _Nearest
    ) -> None:
        """Run one attack until a time.

        What a closed form that is cut off would have read is open, and the update counts as above;
        of a search counts what it has found until then.
        """
        left = until - clock.now()
        if found.above:
            return
        if left <= 0.0:
            found.cut_off(method)
            return
        given = replace(task, budget=replace(task.budget, seconds=left))
        begun = clock.now()
        try:
            with cut_off_after(left + LATE * self.policy.seconds):
                (result,) = method.run([case], given)
        except CutOffError as cut:
            found.cut_off(method)
            for one in cut.found:
                found.take(one)
            return
        found.take(result)
        if not method.closed_form:
            return
        if clock.now() - begun > FINISHED * left:
            found.cut_off(method)
        else:
            read = () if isinstance(result, Refusal) else result.trials
            self._finished[1][method.name, task.tier] = any(not trial.failed for trial in read)

    def _methods(self, case: Case) -> tuple[list[Attacker], list[Attacker]]:
        """Return the closed forms, the cheapest first, and the searches that suit a case."""
        kind = self._kind.name
        readings = [attack(name) for name in closed_forms() if kind in ATTACKS[name].inputs]
        searches = [
            attack(name).after_closed_forms()
            for name in ATTACKS
            if kind in ATTACKS[name].inputs and not ATTACKS[name].closed_form
            if attack(name).suits(case)
        ]
        return readings, searches

    def _observed(self, candidate: Candidate, step: Step) -> Observation:
        count = len(candidate.examples)
        sent = self.sent.declaration
        return replace(
            self.sent,
            update=candidate.update,
            returned_buffers=candidate.buffers,
            declaration=sent.updated(
                {
                    "num_examples": count,
                    "batch_size": min(candidate.batch_size, count),
                    "defenses": [*self.defenses, *step.chain.public()],
                }
            ),
        )


@dataclass
class _Nearest:
    """The nearest that attacks came to a site's own examples."""

    policy: GuardPolicy
    declaration: ClientDeclaration
    scorer: Scorer
    truth: Truth
    above: bool = False
    unfinished: bool = False
    looked: bool = False
    attack: str = ""
    value: float | None = None
    note: str = ""
    refused: list[str] = field(default_factory=list)

    def cut_off(self, method: Attacker) -> None:
        """Note that time ran out before an attack was done."""
        self.note = f"{method.name} ran out of time"
        if method.closed_form and not self.above:
            self.above, self.attack, self.unfinished = True, method.name, True

    @property
    def _score(self) -> str:
        limit = self.policy.limit
        if isinstance(limit, dict):
            return next(iter(limit))
        return input_of(self.declaration).primary.value

    def take(self, result: Reconstruction | Refusal) -> None:
        """Score every trial of a result."""
        if isinstance(result, Refusal):
            self.refused.append(result.reason)
            return
        for trial in result.trials:
            if not trial.failed:
                self._judge(trial, result.attack)

    def finding(self) -> Finding:
        """Return what was found; where no attack could look, the update counts as above."""
        note = self.note or ("" if self.looked else "; ".join(dict.fromkeys(self.refused)))
        return Finding(
            above=self.above or not self.looked,
            attack=self.attack,
            score=self._score,
            value=self.value,
            note=note,
            unfinished=self.unfinished or not (self.above or self.looked or not self.note),
        )

    def _judge(self, trial: Trial, name: str) -> None:
        loss = loss_of(self.declaration.loss)
        named = trial.label_probabilities
        if not loss.per_token:
            named = named[:, 0] if named.shape[1] == 1 else named.argmax(dim=1)
        scored = self.scorer.score(
            trial.images, self.truth, recovered=named if loss.labelled else None
        )
        self.looked = True
        for row in scored.rows:
            self._note(row, trial.attack or name)
        if self.policy.limit == "leaked" and not self.above:
            self.above = self._leaked(trial, scored)

    def _note(self, row: Scores, attack: str) -> None:
        value = getattr(row, self._score)
        if value is None:
            return
        if not math.isfinite(value):
            self.above, self.attack, self.note = True, attack, f"{self._score} is not finite"
            return
        lower = self._score in LOWER_IS_NEARER
        if self.value is None or (value < self.value if lower else value > self.value):
            self.value, self.attack = value, attack
        if isinstance(self.policy.limit, dict):
            (limit,) = self.policy.limit.values()
            self.above |= value <= limit if lower else value >= limit

    def _leaked(self, trial: Trial, scored: ScoredImages) -> bool:
        references, count = self.scorer.references, len(trial.images)
        made = {}
        if references is not None:
            made = references.baselines(torch.tensor(scored.labels), count, seed=0)
        baselines = self.scorer.baselines(made, scored, self.truth, count)
        retrieved = self.scorer.retrieval(trial.images, scored, self.truth)
        images = [
            ImageResult(
                index=number,
                scores=row,
                retrieval=retrieved[number],
                baselines={name: rows[number] for name, rows in baselines.items()},
            )
            for number, row in enumerate(scored.rows)
        ]
        audit = AuditResult(
            question="reconstruction",
            round=1,
            client="site",
            attack="",
            images=images,
            scored=len(images),
        )
        rule = LeakRule()
        (decisions,) = rule.decide([audit])
        return any(
            one.reason is not None
            # Too few examples of the site are alike to tell a copy from chance.
            or (not one.decided and rule.readable(image, audit) is not None)
            for one, image in zip(decisions, images, strict=True)
        )


def _load() -> None:
    """Import what attacks and scores import when they first run.

    It takes seconds, once, which are none of a guard's time.
    """
    import scipy.optimize
    import torch._dynamo
    from skimage.metrics import structural_similarity

    del scipy, structural_similarity, torch


_load()
