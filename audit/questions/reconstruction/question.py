"""Attack observations, score what was reconstructed against the clients' truth, and record it."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from bract.attacks import ATTACKS, Budget, Case, Engine, Progress, Reconstruction, Refusal, attack
from bract.attacks.base import SECONDS, Attacker
from bract.attacks.problem.evidence import has_attacker
from bract.attacks.registry import families, title_of
from bract.attacks.result import SeedBudget
from bract.attacks.task import AttackTask, open_cases, open_over_rounds
from bract.audit.allowance import CutOffError
from bract.audit.basis import Basis, changes
from bract.audit.captures import Capture
from bract.audit.handled import why_unhandled
from bract.audit.observations import Observations
from bract.audit.questions.base import QUESTIONS, Probe, Question
from bract.audit.questions.reconstruction.notes import cut_notes, notes_of, prior_notes
from bract.audit.questions.reconstruction.plan import Estimates, in_turns, infeasible, together
from bract.audit.questions.reconstruction.probing import PROBED, EnoughError, Pace
from bract.audit.questions.reconstruction.rule import ReconstructionRule
from bract.audit.questions.reconstruction.score import Attempt, Judge
from bract.audit.results import Batch, Results
from bract.audit.returned import read_returned
from bract.audit.truth import load_truth
from bract.captures.observation import Observation
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, shown
from bract.inputs.base import input_of
from bract.installed.plugins import PluginError, blaming
from bract.schema import AuditResult
from bract.schema.audit import AuditBudget, InformationEstimate
from bract.seeds import derive_seed

_log = logging.getLogger(__name__)

PROPER = 1 / 3
"""Share of the seconds of its `Cost` that an attack needs, for its result to say anything."""

CUT_OFF = "cut_off"
"""Setting of a result whose attack was cut off."""

Opened = list[tuple[Capture, Observation]]


@QUESTIONS.register("reconstruction")
class ReconstructionQuestion(ReconstructionRule, Question[AuditResult]):
    """Which inputs of the clients can be rebuilt, by each of the request's attacks."""

    def __init__(self, seen: Observations, files: Results, basis: Basis) -> None:
        super().__init__(seen, files, basis)
        request = seen.request
        self.attacks: dict[str, Attacker] = {name: attack(name) for name in request.attacks}
        self._judge = Judge(
            seen.data, request.seed, request.device, request.max_images, kept=seen.kept
        )
        self._estimates = Estimates() if request.estimate else None

    def share(self, other: Self) -> None:
        """Take the baselines, which follow from a plain upload's declaration in any tier."""
        plain = ("oblivious", "adaptive")
        tiers = self.seen.request.tier, other.seen.request.tier
        if all(tier in plain for tier in tiers):
            self._judge.share(other._judge)

    @classmethod
    def offered(cls, seen: Observations) -> bool:
        """Return True: every upload can be attacked."""
        del seen
        return True

    def plan(self, device: str, *, resume: bool) -> list[Batch]:
        """Return the attacks to run: those that may succeed first, of these the cheapest."""
        batches: list[Batch] = []
        request, chosen, limited = self.seen.request, self.seen.chosen, self.seen.allowance
        chosen = in_turns(chosen, None if limited is None else request.seed)
        turns = {capture.key: turn for turn, capture in enumerate(chosen)}
        for name in self.attacks:
            for repeat in range(request.repeats):
                each = (Batch(self.name, name, repeat, (c,)) for c in chosen)
                left = [b.captures[0] for b in each if not resume or self._due(b) is not None]
                most = request.batch
                if limited is not None:
                    most = self._affordable(name, most)
                groups = together(left, device=device, max_images=request.max_images, most=most)
                batches += [Batch(self.name, name, repeat, captures) for captures in groups]

        def rank(batch: Batch) -> tuple[bool, float, float]:
            in_vain = all(infeasible(c, request, batch.attack) for c in batch.captures)
            turn = min(turns[c.key] for c in batch.captures)
            return in_vain, SECONDS[ATTACKS[batch.attack].cost], turn

        return sorted(batches, key=rank)

    def _affordable(self, name: str, most: int | None) -> int | None:
        """Return how many observations one batch may hold, so that each gets what it needs."""
        allowance, need = self.seen.allowance, self.needs_seconds(name)
        if allowance is None or allowance.share >= need:
            return most
        fit = max(1, int(allowance.seconds / need))
        return fit if most is None else min(most, fit)

    def needs_seconds(self, attack: str) -> float:
        """Return the seconds below which an attack on one observation shows little.

        A GPU attacks hundreds together in the time of one: there it is 0.
        """
        if self.seen.device.type != "cpu":
            return 0.0
        return PROPER * SECONDS[ATTACKS[attack].cost] * self.seen.request.restarts

    def ask(
        self, batch: Batch, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[AuditResult]:
        """Attack a batch; yield one result an observation as soon as it is scored."""
        yield from self._attack(batch, progress)
        self.files.forget(batch.attack)
        # Errors that were caught hold on to what a batch read, by their tracebacks.
        gc.collect()

    def _attack(
        self, batch: Batch, progress: Callable[[Progress], None] | None
    ) -> Iterator[AuditResult]:
        state = self.files.unfinished(batch.attack)
        # Half-made reconstructions are personal data too.
        make_private_folder(state)
        engine = Engine(
            device=self.seen.request.device,
            progress=progress,
            checkpoint=state / self.files.state,
        )
        opened: Opened = []
        for capture in batch.captures:
            try:
                self._check(batch, capture)
                opened.append((capture, self.seen.open(capture)))
            except BractError as error:
                yield self._refused(batch, capture, str(error))
                continue
            self.seen.check(*opened[-1])
        if opened:
            cases, found = self._run(batch, opened, engine)
            results = iter(found)
            for (capture, _), case in zip(opened, cases, strict=True):
                if isinstance(case, Refusal):
                    yield self._refused(batch, capture, case.reason)
                elif isinstance(result := next(results), Refusal):
                    yield self._refused(batch, capture, result.reason)
                else:
                    yield self._recorded(batch, capture, case, result)

    def begin(self, *, resume: bool) -> None:
        """Remove the earlier results of the chosen observations that this audit replaces."""
        stale: Counter[str] = Counter()
        for name in {} if resume else self.attacks:
            self.files.forget(name)
            for capture in self.seen.chosen:
                self.files.remove(name, capture)
        for batch in self._each() if resume else ():
            if (reason := self._due(batch)) is not None:
                stale[reason] += self.files.path(batch, batch.captures[0]).exists()
                self.files.remove(batch.attack, batch.captures[0], batch.repeat)
        for reason, count in stale.items():
            if count:
                _log.warning("%d earlier results are attacked again: %s", count, reason)

    def execute(
        self, batch: Batch, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[AuditResult]:
        """Attack a batch; write and yield each result as soon as it is scored."""
        captures = {capture.key: capture for capture in batch.captures}
        for result in self.ask(batch, progress):
            capture = captures[f"round-{result.round:04d}/{result.client}"]
            self.files.write(self.files.path(batch, capture), result)
            yield result

    def answers(self) -> Iterator[AuditResult]:
        """Read the results of the chosen observations, by this audit or earlier ones."""
        found = (self.files.read(batch, batch.captures[0]) for batch in self._each())
        return (result for result in found if result is not None)

    def accept(self, batch: Batch, returned: Mapping[str, bytes]) -> list[AuditResult]:
        """Check the files that a worker made of a batch, and keep them as `execute` does."""
        found = []
        for capture in batch.captures:
            path = self.files.path(batch, capture)
            record = read_returned(returned, path.stem, self.about(batch, capture))
            if record.refused is None and self._other_settings(batch, record):
                raise BractError(
                    f"{path.stem}: attacked with other settings than were asked for",
                    code="worker-failed",
                )
            found.append((path, record))
        for path, record in found:
            self.files.keep(path, record, returned)
        return [record for _, record in found]

    def _each(self) -> Iterator[Batch]:
        """Yield every attack on a single observation."""
        for name in self.attacks:
            for capture in self.seen.chosen:
                for repeat in range(self.seen.request.repeats):
                    yield Batch(self.name, name, repeat, (capture,))

    def _due(self, batch: Batch) -> str | None:
        """Return why a result must be made: there is none that still holds, or more can be had.

        A refusal is tried again, and what was unscored where the truth is there by now.
        """
        (capture,) = batch.captures
        found = self.files.read(batch, capture)
        if found is None:
            return "no readable result of this version"
        if found.refused is not None:
            return "refused before"
        if not found.scored and self.seen.truth(capture) is not None:
            return "the truth is there by now"
        other = self._other_settings(batch, found)
        return other or "; ".join(changes(found.basis, self.basis.of(capture))) or None

    def _other_settings(self, batch: Batch, found: AuditResult) -> str | None:
        """Return how a result was made otherwise than this audit would make it, or None."""
        method = found.chosen_attack or batch.attack
        if method not in ATTACKS:
            return f"{shown(method)} is no attack here"
        budget = self._budget(method)
        if self.seen.allowance is not None and found.budget is not None:
            # Shares of one time differ from attack to attack.
            budget = budget.model_copy(update={"seconds": found.budget.seconds})
        wanted = (self.seen.request.tier, self._seed(batch), budget)
        return None if (found.tier, found.seed, found.budget) == wanted else "other settings"

    def about(self, batch: Batch, capture: Capture) -> AuditResult:
        """Return what a result holds whatever is found, but for rounds that prove unusable."""
        request, declaration = self.seen.request, capture.declaration
        defenses = [str(d.get("name")) for d in declaration.defenses]
        return AuditResult(
            round=capture.round,
            client=capture.client,
            members=list(capture.members),
            observer=request.observer,
            rounds=[c.round for c in capture.rounds] if request.over_rounds > 1 else [],
            attack=batch.attack,
            input=declaration.input,
            tier=request.tier,
            read_as=self.seen.tier_of(*batch.captures),
            defenses=defenses,
            encryption=declaration.encryption,
            num_examples=declaration.num_examples,
            local_steps=declaration.local_steps,
            seed=request.seed,
            repeat=batch.repeat,
            basis=self.basis.of(capture),
            check=self.seen.checks.get(capture.key),
            titles={n: title_of(n) for n in ATTACKS if declaration.input in ATTACKS[n].inputs},
            families=families({declaration.input}),
            portfolio=ATTACKS[batch.attack].portfolio,
            adaptive=bool(defenses) and has_attacker(defenses),
        )

    def probe(self, batch: Batch, seconds: float) -> Probe | None:
        """Attack some of a batch for a moment, and keep nothing.

        Returns
        -------
        Probe or None
            The estimate is of what came before the first report, and of the rest at the pace from
            there on. None where nothing could be attacked.
        """
        opened: Opened = []
        restarts = self.seen.request.restarts
        for capture in batch.captures[: max(1, PROBED // restarts)]:
            with contextlib.suppress(BractError):
                self._check_input(batch, capture)
                opened.append((capture, self.seen.open(capture)))
        pace = Pace(seconds)
        engine = Engine(device=self.seen.request.device, progress=pace.report)
        try:
            cases, _ = self._run(batch, opened, engine)
        except EnoughError:
            whole = pace.whole()
        else:
            if not any(isinstance(case, Case) for case in cases):
                return None
            whole = pace.spent()
        return Probe(whole / len(opened), min(PROBED, len(opened) * restarts))

    def infeasible(self, batch: Batch, capture: Capture) -> str | None:
        """Return why nothing can be expected of an upload, by its declaration alone, or None."""
        return infeasible(capture, self.seen.request, batch.attack)

    def _check(self, batch: Batch, capture: Capture) -> None:
        """Refuse an upload that this attack cannot or shall not be run on."""
        allowance = self.seen.allowance
        if allowance is not None and allowance.is_spent(self.seen.request.tier):
            raise BractError(
                f"the budget of {allowance.seconds:g} s for the whole audit was spent on "
                "others, drawn from all rounds; give it more, or each upload its own: "
                "--set audit.budget_each=true",
                code="budget-spent",
            )
        self._check_input(batch, capture)
        self._check_disjoint(capture)

    def _check_input(self, batch: Batch, capture: Capture) -> None:
        handled = self.attacks[batch.attack].inputs
        reason = why_unhandled(capture.declaration.input, batch.attack, handled)
        if reason is None:
            reason = input_of(capture.declaration).unreadable(capture.declaration)
        if reason is not None:
            raise BractError(f"{capture.key}: {reason}", code="input-mismatch")

    def _check_disjoint(self, capture: Capture) -> None:
        """Refuse an upload of an image that the prior was trained on: it would come from memory.

        So would one that was trained on mirrored, turned or a little shifted. The truth decides
        whether anything is attacked, and nothing else.
        """
        public = self.seen.public
        truth = None if public is None else self.seen.truth(capture)
        if public is None or truth is None:
            return
        with blaming(type(public)):
            known = int(public.trained_on(truth.images).sum())
        if known:
            raise BractError(
                f"{capture.key}: {known} of {len(truth.images)} images are among those that the "
                f"prior was trained on ({public.source}), or mirrored, turned or shifted "
                "copies of them, so it would return them from memory; train it on other images",
                code="prior-unsuited",
            )

    def _whole_budget(self) -> Budget:
        request = self.seen.request
        return Budget(
            iterations=request.iterations,
            seconds=self.seen.seconds,
            restarts=request.restarts,
            max_images=request.max_images,
            weak_seeds=SeedBudget(candidates=request.weak_seeds),
        )

    def _run(
        self, batch: Batch, opened: Opened, engine: Engine
    ) -> tuple[list[Case | Refusal], list[Reconstruction | Refusal]]:
        """Attack observations; return their cases, and one result for each that is no refusal."""
        seen = self.seen
        earlier = {one.key: seen.history(one) for capture, _ in opened for one in capture.rounds}
        task = AttackTask(
            budget=self._whole_budget(),
            seed=self._seed(batch),
            tier=seen.tier_of(*batch.captures),
            engine=engine,
            history=lambda observation: earlier[observation.key],
            public=seen.public,
        )
        cases, left = self._cases(batch, opened, task)
        usable = [case for case in cases if isinstance(case, Case)]
        allowance = seen.allowance
        if allowance is None:
            return cases, self._results(batch.attack, usable, left)
        try:
            with allowance.bounded():
                return cases, self._results(batch.attack, usable, left)
        except CutOffError as cut:
            reason = (
                f"cut off: the budget of {allowance.seconds:g} s for the whole audit was over by "
                "half, as the attack took no notice of it or the machine was too busy; give it more"
            )
            found = {one.observation: one for one in cut.found}
            keys = [case.observation.key for case in usable]
            return cases, [
                replace(found[key], settings=found[key].settings | {CUT_OFF: True})
                if key in found
                else Refusal(
                    attack=batch.attack, observation=key, reason=reason, code="budget-spent"
                )
                for key in keys
            ]

    def _results(
        self, name: str, usable: Sequence[Case], task: AttackTask
    ) -> list[Reconstruction | Refusal]:
        """Run an attack; one of another package that fails costs its own results alone."""
        chosen = self.attacks[name]
        try:
            with blaming(type(chosen)):
                return chosen.run(usable, task)
        except PluginError as error:
            return [
                Refusal(
                    attack=name,
                    observation=case.observation.key,
                    reason=str(error),
                    code=error.code,
                )
                for case in usable
            ]

    def _recorded(
        self, batch: Batch, capture: Capture, case: Case, result: Reconstruction
    ) -> AuditResult:
        """Score a reconstruction; an input of another package that fails is a refusal."""
        try:
            with blaming(type(input_of(case.observation.declaration))):
                return self._record(batch, capture, case, result)
        except PluginError as error:
            return self._refused(batch, capture, str(error))

    def _cases(
        self, batch: Batch, opened: Opened, task: AttackTask
    ) -> tuple[list[Case | Refusal], AttackTask]:
        """Open observations, each with the earlier ones that it is attacked with."""
        name, needs = batch.attack, self.attacks[batch.attack].needs
        if self.seen.request.over_rounds == 1:
            return open_cases([seen for _, seen in opened], task, attack=name, needs=needs)
        groups = [[*self._earlier(capture), seen] for capture, seen in opened]
        return open_over_rounds(groups, task, attack=name, needs=needs)

    def _earlier(self, capture: Capture) -> Iterator[Observation]:
        """Open the rounds that are attacked with a capture; one that cannot be read is left out."""
        for one in capture.earlier:
            try:
                yield self.seen.open(one)
            except BractError as error:
                _log.warning("%s: left out of the attack over rounds: %s", one.key, error)

    def _seed(self, batch: Batch) -> int:
        again = (batch.repeat,) if batch.repeat else ()
        return derive_seed(self.seen.request.seed, "audit", batch.attack, *again)

    def _budget(self, method: str) -> AuditBudget:
        """Return what one restart of the attack that made the images was allowed."""
        request = self.seen.request
        iterations = request.iterations
        if iterations is None and self.seen.seconds is None:
            iterations = ATTACKS[method].iterations
        return AuditBudget(
            iterations=iterations,
            seconds=self.seen.seconds,
            restarts=request.restarts,
            max_images=request.max_images,
        )

    def _refused(self, batch: Batch, capture: Capture, reason: str) -> AuditResult:
        changes = {
            "refused": reason,
            "budget": self._budget(batch.attack),
            "device": str(self.seen.device),
        }
        return self.about(batch, capture).model_copy(update=changes)

    def _estimate(self, case: Case) -> InformationEstimate | None:
        return None if self._estimates is None else self._estimates.of(case)

    def _record(
        self, batch: Batch, capture: Capture, case: Case, result: Reconstruction
    ) -> AuditResult:
        """Score a reconstruction; what it is of, found and worth makes one record."""
        # Only the rounds that were attacked count for what the reconstruction is held against.
        matched = capture.within({one.observation.round for one in case.rounds or (case,)})
        folder = self.seen.truth_folder
        own = load_truth(folder, matched) if matched.earlier else None
        mine = partial(self.seen.kept, capture)
        attempt = Attempt(_last_round(case, matched), result, self._estimate(case), own, mine)
        judged = self._judge.judge(
            attempt, self.seen.truth(matched), self.files.path(batch, capture)
        )
        about, found = self.about(batch, capture), result.record()
        rounds = [one.round for one in matched.rounds] if about.rounds else []
        notes = [
            *cut_notes(result.attack, bool(result.settings.get(CUT_OFF))),
            *judged.notes,
            *notes_of(case, capture, matched),
            *prior_notes(self.seen.public, checked=bool(judged.scored)),
        ]
        more = {
            "rounds": rounds,
            "budget": self._budget(found.chosen_attack or batch.attack),
            "device": str(self.seen.device),
            "notes": notes,
        }
        return about.model_copy(update=vars(found) | vars(judged) | more)


def _last_round(case: Case, capture: Capture) -> Case:
    """Return a case of one round, the last if it was opened, which the diagnosis is about."""
    own = [c for c in case.rounds if c.observation.key == capture.key]
    return next(iter(own or case.rounds[-1:]), case)
