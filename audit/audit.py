"""The audit: attack what was captured, score it against the clients' own truth, write it down.

Every attacked observation leaves one JSON file and its pictures in ``audit/<attack>/``, of other
tiers than ``oblivious`` in ``audit/<attack>-<tier>/``. A file that is there is complete, and an
attack that runs keeps its state in ``unfinished/`` beside it, so an interrupted audit goes on
where it stopped.

Longer than most modules: planning, attacking and writing share which results are due.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bract.attacks import (
    ATTACKS,
    Attacker,
    AttackTask,
    Budget,
    Case,
    Engine,
    Reconstruction,
    Refusal,
    TrainedPrior,
    attack,
    load_prior,
    open_cases,
    open_over_rounds,
)
from bract.attacks.adaptive.weak_seeds import SeedBudget, seed_budget
from bract.attacks.solve.engine import Progress
from bract.audit.basis import Basis, changes
from bract.audit.batches import Batch, together
from bract.audit.captures import Capture, Captures, Lazy, select
from bract.audit.choice import AuditChoice
from bract.audit.groups import distinct, over_rounds
from bract.audit.hopeless import why_hopeless
from bract.audit.observer import CuriousClient
from bract.audit.prospects import Prospects
from bract.audit.results import Results
from bract.audit.returned import read_returned
from bract.audit.scoring.judging import Attempt, Judge
from bract.audit.scoring.reference import KeptImages
from bract.audit.scoring.scoring import Truth, check_truth, load_truth
from bract.audit.uncaptured import check_at_hand
from bract.config import DataConfig, FederationConfig
from bract.errors import BractError, shown
from bract.permissions import make_private_folder
from bract.protocol.observation import Observation
from bract.rundir import RunDirectory
from bract.schema import AuditBudget, AuditResult, Tier
from bract.schema.description import DESCRIPTION
from bract.seeds import derive_seed
from bract.strict_json import json_ready

if TYPE_CHECKING:
    from bract.audit.collusion import Collusion

_log = logging.getLogger(__name__)

MEAN_OF_DEFENDED = (
    "The aggregate of defended updates was attacked as it is (an oblivious reading): what undoes a "
    "defense works on one client's update."
)


NOT_TRIED = "not worth trying: "
"""How the reason of an upload begins that `AuditChoice.skip_hopeless` left out."""

PROBED = 8
"""Most restarts, over all uploads, that a probe attacks at once."""


class _EnoughError(Exception):
    """A probe has run long enough."""


class Audit:
    """One audit of a run.

    Parameters
    ----------
    run
        A finished or interrupted run.
    choice
        What to attack.
    resume
        Skip observations that an earlier audit of the same settings has done, with the same
        versions and code, on the same capture and truth (`Basis`). Otherwise every
        chosen one is attacked, and its earlier results are removed when the first attack begins;
        those of other clients, rounds, attacks and tiers stay.
    output
        Folder of the results; None takes the run's ``audit/``.

    Raises
    ------
    BractError
        If an attack, client or device is unknown, no capture is of the chosen rounds and clients,
        the chosen truth is none of these clients', or the key cannot be read. Nothing has been
        removed then.
    """

    def __init__(
        self,
        run: RunDirectory,
        choice: AuditChoice,
        *,
        resume: bool = False,
        output: Path | None = None,
    ) -> None:
        self.run = run
        self.choice = choice
        self.resume = resume
        self.config: FederationConfig = run.config()
        self.attacks: dict[str, Attacker] = {name: attack(name) for name in choice.attacks}
        device = Engine(device=choice.device).torch_device()
        self.device = str(device)
        self._device = device.type
        self._collusion: Collusion | None = None
        if choice.tier == "colluding" and choice.key is not None:
            # What an encrypted run keeps is read with Flower's records; no other audit needs them.
            from bract.audit.collusion import Collusion

            self._collusion = Collusion(run, choice.key)
        self._public = None if choice.prior is None else load_prior(choice.prior)
        if (choice.tier == "surrogate") != (self._public is not None):
            raise BractError(
                "the surrogate tier and a prior go together: --tier surrogate --prior FILE; "
                "`bract prior train` makes one"
            )
        self._captures = Captures.of_run(run, choice.models)
        self._observer = None
        if choice.observer is not None:
            if choice.tier != "oblivious":
                raise BractError(
                    f"--observer goes with --tier oblivious, not with {choice.tier}: what undoes a "
                    "defense or opens a ciphertext works on one client's update"
                )
            self._observer = CuriousClient(run, self._captures, choice.observer)
        self._chosen = self._choose()
        self._captures.check_models(self._chosen)
        if choice.truth is not None:
            check_truth(choice.truth, self._chosen)
        self._judge = Judge(
            self._data(), choice.seed, choice.device, choice.max_images, self._kept()
        )
        self._files = Results(output or run.audit, choice.tier, choice.over_rounds, choice.observer)
        truth = choice.truth or run.truth
        self._basis = Basis(
            run, self.config, choice, self._captures, truth, self._judge.data, self._observer
        )
        self._prospects = Prospects()
        self._begun = False

    def _data(self) -> DataConfig | None:
        """Say which test data reconstructions are held against; None where nobody named any."""
        if self.run.is_configured:
            return self.config.data
        description = self.run.description()
        if description is None or description.data is None:
            return None
        shape = next(
            (c.declaration.image_shape for c in self._chosen if c.declaration.image_shape), None
        )
        if shape is None:
            return description.data
        channels, size, _ = shape
        if channels not in (1, 3):
            raise BractError(
                f"{self.run.root / DESCRIPTION}: data holds images of 1 or 3 channels, the model "
                f"takes {channels}; take the data section out"
            )
        fitted = {"channels": channels, "image_size": size}
        return description.data.model_copy(update=fitted)

    def _kept(self) -> KeptImages:
        """Return the images that any captured client kept."""
        truths = (self._truth(capture) for capture in self._captures.index)
        return KeptImages(((t.images, t.labels) for t in truths if t is not None), self.choice.seed)

    def plan(self, device: str | None = None) -> list[Batch]:
        """Return what is to be done, what may bring something back first.

        With ``resume`` without what is done. ``device`` is the kind, ``cpu`` or ``cuda``, that the
        batches are for; None takes this audit's own.
        """
        batches: list[Batch] = []
        for name in self.attacks:
            for repeat in range(self.choice.repeats):
                due = [c for c in self._chosen if self._due(name, c, repeat) is not None]
                groups = together(
                    due,
                    device=device or self._device,
                    max_images=self.choice.max_images,
                    most=self.choice.batch,
                )
                batches += [Batch(name, repeat, captures) for captures in groups]
        return sorted(batches, key=self._is_hopeless)

    def batch(self, attack: str, repeat: int, keys: Collection[str]) -> Batch:
        """Return the batch of the chosen observations with these keys, as another audit planned it.

        Raises
        ------
        BractError
            If one is not there.
        """
        found = {capture.key: capture for capture in self._chosen}
        if missing := sorted(set(keys) - found.keys()):
            raise BractError(f"{self.run.captures}: {missing[0]} is not among the captures here")
        return Batch(attack, repeat, tuple(found[key] for key in keys))

    def _is_hopeless(self, batch: Batch) -> bool:
        return all(why_hopeless(c, self.choice, batch.attack) for c in batch.captures)

    def results(self) -> list[AuditResult]:
        """Read what was written for the chosen observations, by this audit or earlier ones."""
        return [
            result
            for name in self.attacks
            for capture in self._chosen
            for repeat in range(self.choice.repeats)
            if (result := self._files.read(name, capture, repeat)) is not None
        ]

    def _due(self, name: str, capture: Capture, repeat: int) -> str | None:
        """Say why a result must be made: there is none that still holds, or more can be had now.

        A refusal is tried again, and what was unscored where the truth is there by now.
        """
        found = self._files.read(name, capture, repeat) if self.resume else None
        if found is None:
            return "no readable result of this version"
        if found.refused is not None:
            return "refused before"
        if not found.scored and self._truth(capture) is not None:
            return "the truth is there by now"
        method = found.chosen_attack or name
        if method not in ATTACKS:
            return f"{shown(method)} is no attack here"
        wanted = (self.choice.tier, self._seed(name, repeat), self._budget(method))
        if (found.tier, found.seed, found.budget) != wanted:
            return "other settings"
        return "; ".join(changes(found.basis, self._basis.of(capture))) or None

    def _begin(self) -> None:
        """Remove what the chosen observations' new results take the place of."""
        if self._begun:
            return
        self._begun = True
        stale: Counter[str] = Counter()
        for name in self.attacks:
            if not self.resume:
                self._files.forget(name)
            for capture in self._chosen:
                if not self.resume:
                    self._files.remove(name, capture)
                    continue
                for repeat in range(self.choice.repeats):
                    reason = self._due(name, capture, repeat)
                    if reason is not None:
                        stale[reason] += self._files.path(name, capture, repeat).exists()
                        self._files.remove(name, capture, repeat)
        for reason, count in stale.items():
            if count:
                _log.warning("%d earlier results are attacked again: %s", count, reason)

    def execute(
        self, batches: Iterable[Batch], progress: Callable[[Progress], None] | None = None
    ) -> Iterator[AuditResult]:
        """Run the batches; yield what is written for each observation as soon as it is."""
        budget = self._whole_budget()
        for batch in batches:
            self._begin()
            yield from self._attack(batch, budget, progress)
            self._files.forget(batch.attack)
            # Errors that were caught hold on to what a batch read, by their tracebacks.
            gc.collect()

    def accept(self, batch: Batch, returned: Mapping[str, bytes]) -> list[AuditResult]:
        """Check the files that a worker made of a batch, and keep them as `execute` does.

        Parameters
        ----------
        returned
            Contents by the file's name: one JSON file an observation, and the pictures it names.

        Raises
        ------
        BractError
            If any is not what this audit would have written itself, but for what was found.
            Nothing of the batch is kept then.
        """
        found = []
        for capture in batch.captures:
            path = self._files.path(batch.attack, capture, batch.repeat)
            record = read_returned(returned, path.stem, self._about(batch, capture))
            method = record.chosen_attack or batch.attack
            seed = self._seed(batch.attack, batch.repeat)
            if record.refused is None and (
                method not in ATTACKS
                or (record.seed, record.budget) != (seed, self._budget(method))
            ):
                raise BractError(f"{path.stem}: attacked with other settings than were asked for")
            found.append(record)
        self._begin()
        for capture, record in zip(batch.captures, found, strict=True):
            self._files.keep(batch.attack, capture, batch.repeat, record, returned)
        return found

    def probe(self, batch: Batch, seconds: float) -> float | None:
        """Attack some of a batch for a moment, and keep nothing.

        Returns
        -------
        float or None
            Estimated wall time of the whole attack on one upload: what came before the first
            report, and the rest at the pace from there on. None where nothing could be attacked.
        """
        opened: list[tuple[Capture, Observation]] = []
        for capture in batch.captures[: max(1, PROBED // self.choice.restarts)]:
            with contextlib.suppress(BractError):
                opened.append((capture, self._open(capture)))
        begun = time.perf_counter()
        reports: list[tuple[float, float]] = []

        def look(progress: Progress) -> None:
            spent = time.perf_counter() - begun
            if progress.fraction > (reports[-1][1] if reports else 0.0):
                reports.append((spent, progress.fraction))
            if spent > seconds and len(reports) > 1:
                raise _EnoughError

        engine = Engine(device=self.choice.device, progress=look)
        try:
            cases, _ = self._run(batch, opened, self._whole_budget(), engine)
        except _EnoughError:
            (first, from_share), (last, share) = reports[0], reports[-1]
            whole = first + (last - first) * (1 - from_share) / (share - from_share)
        else:
            if not any(isinstance(case, Case) for case in cases):
                return None
            whole = time.perf_counter() - begun
        return whole / len(opened)

    def _whole_budget(self) -> Budget:
        return Budget(
            iterations=self.choice.iterations,
            seconds=self.choice.seconds,
            restarts=self.choice.restarts,
            max_images=self.choice.max_images,
        )

    def _attack(
        self, batch: Batch, budget: Budget, progress: Callable[[Progress], None] | None
    ) -> Iterator[AuditResult]:
        unfinished = self._files.unfinished(batch.attack)
        # Half-made reconstructions are personal data too.
        make_private_folder(unfinished)
        unfinished = unfinished / self._basis.state
        engine = Engine(device=self.choice.device, progress=progress, checkpoint=unfinished)
        opened: list[tuple[Capture, Observation]] = []
        for capture in batch.captures:
            try:
                self._check_disjoint(capture)
                reason = why_hopeless(capture, self.choice, batch.attack)
                if reason is not None and self.choice.skip_hopeless:
                    raise BractError(NOT_TRIED + reason)
                opened.append((capture, self._open(capture)))
            except BractError as error:
                refusal = Refusal(attack=batch.attack, observation=capture.key, reason=str(error))
                yield self._record(batch, capture, refusal, engine)
        if not opened:
            return
        cases, found = self._run(batch, opened, budget, engine)
        results = iter(found)
        for (capture, _), case in zip(opened, cases, strict=True):
            if isinstance(case, Refusal):
                yield self._record(batch, capture, case, engine)
            else:
                yield self._record(batch, capture, next(results), engine, case)

    def _run(
        self,
        batch: Batch,
        opened: list[tuple[Capture, Observation]],
        budget: Budget,
        engine: Engine,
    ) -> tuple[list[Case | Refusal], list[Reconstruction | Refusal]]:
        """Attack observations; return their cases, and one result for each that is no refusal."""
        earlier = {one.key: self._history(one) for capture, _ in opened for one in capture.rounds}
        task = AttackTask(
            budget=budget,
            seed=self._seed(batch.attack, batch.repeat),
            tier=self._tier(batch),
            engine=engine,
            history=lambda observation: earlier[observation.key],
            public=self._public,
        )
        with seed_budget(SeedBudget(candidates=self.choice.weak_seeds)):
            cases, left = self._cases(batch, opened, task)
            if self.choice.skip_hopeless:
                cases = [self._worth_trying(batch.attack, case) for case in cases]
            usable = [case for case in cases if isinstance(case, Case)]
            return cases, self.attacks[batch.attack].run(usable, left)

    def _cases(
        self, batch: Batch, opened: list[tuple[Capture, Observation]], task: AttackTask
    ) -> tuple[list[Case | Refusal], AttackTask]:
        """Open observations, each with the earlier ones that it is attacked with."""
        if self.choice.over_rounds == 1:
            return open_cases([seen for _, seen in opened], task, attack=batch.attack)
        groups = [[*self._earlier(capture), seen] for capture, seen in opened]
        return open_over_rounds(groups, task, attack=batch.attack)

    def _earlier(self, capture: Capture) -> Iterator[Observation]:
        """Open the rounds that are attacked with a capture; one that cannot be read is left out."""
        for one in capture.earlier:
            try:
                yield self._open(one)
            except BractError as error:
                _log.warning("%s: left out of the attack over rounds: %s", one.key, error)

    def _worth_trying(self, name: str, case: Case | Refusal) -> Case | Refusal:
        if isinstance(case, Refusal) or (why := self._prospects.why_hopeless(case)) is None:
            return case
        return Refusal(attack=name, observation=case.observation.key, reason=NOT_TRIED + why)

    def hidden(self, batch: Batch, capture: Capture) -> str | None:
        """Return why an upload of a batch hides its images, or None; costs as much as opening it.

        Not more seeds of its noise are tried than without a choice.
        """
        try:
            observation = self._open(capture)
        except BractError:
            return None
        task = AttackTask(budget=self._whole_budget(), tier=self._tier(batch))
        seeds = min(self.choice.weak_seeds, SeedBudget().candidates)
        with seed_budget(SeedBudget(candidates=seeds)):
            (case,), _ = self._cases(batch, [(capture, observation)], task)
        return None if isinstance(case, Refusal) else self._prospects.why_hopeless(case)

    def _seed(self, name: str, repeat: int) -> int:
        return derive_seed(self.choice.seed, "audit", name, *((repeat,) if repeat else ()))

    def _truth(self, capture: Capture) -> Truth | None:
        """Return what was kept of every round of a capture; None where one of them lacks it."""
        folder = self.choice.truth or self.run.truth
        if not capture.earlier:
            return load_truth(folder, capture)
        kept = [load_truth(folder, one) for one in reversed(capture.rounds)]
        known = [truth for truth in kept if truth is not None]
        return distinct(known) if len(known) == len(kept) else None

    def _tier(self, batch: Batch) -> Tier:
        """Return what the attacker knows; what undoes a defense knows one client's update only."""
        if any(capture.members for capture in batch.captures):
            return "oblivious"
        return self.choice.tier

    def _check_disjoint(self, capture: Capture) -> None:
        """Refuse an upload of an image that the prior was trained on: it would come from memory.

        So would one that was trained on mirrored, turned or a little shifted. The truth decides
        whether anything is attacked, and nothing else.
        """
        truth = None if self._public is None else self._truth(capture)
        if self._public is None or truth is None:
            return
        known = int(self._public.trained_on(truth.images).sum())
        if known:
            raise BractError(
                f"{capture.key}: {known} of {len(truth.images)} images are among those that the "
                f"prior was trained on ({self._public.facts.source}), or mirrored, turned or "
                "shifted copies of them, so it would return them from memory; train it on other "
                "images"
            )

    def _open(self, capture: Capture) -> Observation:
        """Return what the attacker of this tier sees of an observation."""
        self._captures.check_model(capture)
        if self._observer is not None:
            return self._observer.open(capture)
        if capture.members and self._collusion is not None:
            return self._collusion.aggregate(capture)
        observation = self._captures.load(capture)
        return observation if self._collusion is None else self._collusion.open(observation)

    def _history(self, capture: Capture) -> Lazy:
        """Return the earlier observations of the same client, by round."""
        return Lazy(self._captures.before(capture), self._open)

    def _choose(self) -> list[Capture]:
        found = list(self._captures.index)
        if not found:
            check_at_hand(self.config, self.run.root)
        if self._observer is not None:
            found = self._observer.captures()
        if self._collusion is not None:
            numbers = dict.fromkeys(capture.round for capture in found)
            found += self._collusion.aggregates(self._captures.of_round(r) for r in numbers)
        chosen = select(found, rounds=self.choice.rounds, clients=self.choice.clients)
        chosen = over_rounds(chosen, self.choice.over_rounds)
        return sorted(chosen, key=lambda c: (c.round, bool(c.members)))

    def _record(
        self,
        batch: Batch,
        capture: Capture,
        result: Reconstruction | Refusal,
        engine: Engine,
        case: Case | None = None,
    ) -> AuditResult:
        name = batch.attack
        path = self._files.path(name, capture, batch.repeat)
        record = self._about(batch, capture)
        record = record.model_copy(update={"device": str(engine.torch_device())})
        if isinstance(result, Refusal) or case is None:
            reason = result.reason if isinstance(result, Refusal) else None
            more: dict[str, Any] = {"refused": reason, "budget": self._budget(name)}
        else:
            told = self._prospects.of(case)
            matched = _matched(case, capture)
            attempt = Attempt(_last_round(case, matched), result, told, self._own_truth(matched))
            judged = self._judge.judge(attempt, self._truth(matched), path)
            more = vars(judged) | {
                "chosen_attack": result.pick.attack or name,
                "method": result.method,
                "components": list(result.components),
                "unknowns": {n: list(value.shape) for n, value in result.unknowns.items()},
                "trials": [trial.summary() for trial in result.trials],
                "chosen": result.chosen,
                "not_applicable": result.not_applicable,
                "budget": self._budget(result.pick.attack or name),
                "seed": result.seed,
                "settings": json_ready(result.settings),
                "seconds": result.seconds,
                "iterations": result.iterations,
                "final_loss": result.final_loss,
                "loss_curve": result.loss_curve,
                "gradient_cosine": result.gradient_cosine,
                "gradient_residual": result.gradient_residual,
                "failed": result.failed,
            }
            if self.choice.over_rounds > 1:
                more["rounds"] = [one.round for one in matched.rounds]
            notes = [
                *judged.notes,
                *_disbelieved_notes(case),
                *_left_out_notes(matched, capture),
                *_rounding_notes(matched),
            ]
            if self._public is not None:
                notes += _prior_notes(self._public, checked=judged.scored)
            if record.defenses and capture.members:
                notes.append(MEAN_OF_DEFENDED)
            more["notes"] = notes
        record = AuditResult.model_validate(dict(record) | more)
        self._files.write(name, capture, batch.repeat, record)
        return record

    def _own_truth(self, capture: Capture) -> Truth | None:
        return load_truth(self.choice.truth or self.run.truth, capture) if capture.earlier else None

    def _about(self, batch: Batch, capture: Capture) -> AuditResult:
        """Return what a result says whatever is found, but for rounds that prove unusable."""
        return AuditResult(
            round=capture.round,
            client=capture.client,
            members=list(capture.members),
            observer=self.choice.observer,
            rounds=[c.round for c in capture.rounds] if self.choice.over_rounds > 1 else [],
            attack=batch.attack,
            tier=self.choice.tier,
            read_as=self._tier(batch),
            defenses=[str(d.get("name")) for d in capture.declaration.defenses],
            encryption=capture.declaration.encryption,
            num_examples=capture.declaration.num_examples,
            local_steps=capture.declaration.local_steps,
            seed=self.choice.seed,
            repeat=batch.repeat,
            basis=self._basis.of(capture),
        )

    def _budget(self, method: str) -> AuditBudget:
        """Return what one restart of the attack that made the images was allowed."""
        iterations = self.choice.iterations
        if iterations is None and self.choice.seconds is None:
            iterations = ATTACKS[method].iterations
        return AuditBudget(
            iterations=iterations,
            seconds=self.choice.seconds,
            restarts=self.choice.restarts,
            max_images=self.choice.max_images,
        )


def _last_round(case: Case, capture: Capture) -> Case:
    """Return a case of one round, the last if it was opened, of which the diagnosis speaks."""
    own = [c for c in case.rounds if c.observation.key == capture.key]
    return next(iter(own or case.rounds[-1:]), case)


def _matched(case: Case, capture: Capture) -> Capture:
    """Return a capture of those rounds alone that a case holds the reconstruction against."""
    used = {one.observation.round for one in case.rounds or (case,)}
    *earlier, last = [one for one in capture.rounds if one.round in used] or [capture]
    return replace(last, earlier=tuple(earlier))


def _left_out_notes(matched: Capture, capture: Capture) -> list[str]:
    """Name the rounds of a joint attack that nothing was held against."""
    used = {one.round for one in matched.rounds}
    left = [str(one.round) for one in capture.rounds if one.round not in used]
    if not left:
        return []
    return [
        f"Left out of the attack over rounds: round {', '.join(left)}, which could not be opened, "
        "or holds noise that the others are free of."
    ]


def _disbelieved_notes(case: Case) -> list[str]:
    """Say which returned statistics no attack was told, since no training leaves them."""
    whys = [(one, one.evidence.notes.get("batch_statistics")) for one in case.rounds or (case,)]
    return [
        f"The statistics that came back in round {one.observation.round} were left out, since no "
        f"training leaves them: {why}."
        for one, why in whys
        if why is not None
    ]


def _prior_notes(public: TrainedPrior, *, checked: bool) -> list[str]:
    """Say what the attacker held besides the upload."""
    said = f"The attacker held {public.text}"
    if checked:
        return [
            f"{said}; none of this upload's images is among those, nor mirrored, turned or shifted "
            "by a few pixels."
        ]
    return [
        f"{said}; whether this upload's images are among those was not checked, for want of the "
        "client's truth."
    ]


def _rounding_notes(capture: Capture) -> list[str]:
    """Say that an update was stored rounded; the words are the same for losses of like size."""
    if capture.rounded is None:
        return []
    size = 10.0 ** math.ceil(math.log10(max(capture.rounded.error, 1e-9)))
    return [
        f"Updates were stored rounded to {capture.rounded.dtype} (capture.dtype), by less than "
        f"{size:.0e} of their norm: a server that keeps them as they come may get more out of them."
    ]
