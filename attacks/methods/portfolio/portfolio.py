"""The strongest attack on an upload: `Best` runs stages in order, `Auto` lets attacks compete."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from bract.attacks.base import Attack, Attacker
from bract.attacks.methods.gauss_newton import SOLVED, GaussNewton
from bract.attacks.methods.grnn.grnn import GRNN
from bract.attacks.methods.grnn.grnn_polish import GRNNPolish
from bract.attacks.methods.ig import IG
from bract.attacks.methods.inverting import InvertingAttack, left_of
from bract.attacks.methods.label_inference import LabelInference
from bract.attacks.methods.portfolio.halving import Configuration, Contest, Tournament
from bract.attacks.methods.statistics import Statistics
from bract.attacks.options import Count
from bract.attacks.problem.case import Case
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.reading.entered import Entered
from bract.attacks.registry import ATTACKS, attack, closed_forms
from bract.attacks.result import Budget, CutOffError, Reconstruction, Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.labels import infer_labels
from bract.attacks.solve.local_statistics import local_statistics
from bract.attacks.solve.matching import hard_labels
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.task import OF_ONE_CASE, AttackTask
from bract.errors import BractError
from bract.installed.plugins import elsewhere
from bract.protocol.observation import Observation

BN_WEIGHT = 0.1
"""Chosen on training images after one step of local training with returned buffers: two digits
through lenet-strided-bn in 400 iterations 63 dB, against 49 dB with 0.01 and 35 dB without; two
photographs through resnet20 with ReLU in 250 iterations 9.6 dB, against 6.5 dB without. GRNN goes
without: weights from 0.01 to 1 changed neither by more than 0.2 dB."""

EXPLAINED = 0.01
"""Loss below which an image that a closed form reads off a model with kinks is kept. On images that
no benchmark scores such a loss meant 30 to 100 dB, where GRNN's images of 12 and 17 dB left 0.07;
from a smooth model an image is kept if it is `SOLVED`."""

MATCHED = 0.02
"""Loss of `Statistics` below which its images are kept. Chosen on images that no benchmark scores:
through a fresh ResNet-20 four photographs end at 5e-5 to 8e-3 with 11 to 34 dB, three digits at
0.04 to 0.1 with 8 to 12 dB."""

_GENERATED = (8, 16, 32, 64, 128, 256)
_READING_SHARE = 0.7
_READ_OFF_SHARE = 0.3
"""Most of a budget in seconds that closed forms take, in addition to the other stages."""


class Stage(NamedTuple):
    """One stage of a portfolio.

    Attributes
    ----------
    applies
        Whether it can do something for these trials.
    solve
        Attacks them; None where it reconstructs none of them.
    done
        Whether a trial of this method and loss is kept; others go on to the next stage.
    share
        Share of the budget that it takes; 0 for a stage that takes none of it.
    iterations
        Steps of its own; None takes the share of the budget's.
    near
        Whether a trial of this method and loss, which is not done, is better than what a later
        stage is not done with either, or guesses.
    guesses
        Whether the stage makes an image that a prior decides, where nothing was solved.
    """

    name: str
    applies: Callable[[Problem], bool]
    solve: Callable[[Problem, Run], Outcome | None]
    done: Callable[[str, float, TargetModel], bool]
    share: float
    iterations: int | None = None
    near: Callable[[str, float], bool] = lambda _, __: False
    guesses: bool = False


@ATTACKS.register("best")
@dataclass(frozen=True, kw_only=True)
class Best(Attack):
    """Solve where that is possible, generate where it is not: the first of `stages` that succeeds.

    1. *Closed form*: one image through a chain of layers, or a transformer's patches, is read off.
    2. *Readings*: images through a deep model with kinks are found from what entered a layer, where
       its gradient tells it: of several readings by the one that the update determines best
       (`Determined.order`).
    3. *Statistics*: where the capture holds batch statistics of the client's own step, and enough
       of them to decide, they are inverted through a model with kinks.
    4. *Solve*: on a smooth model, Gauss-Newton reaches the rounding of the captured numbers. Not
       under noise, which least squares without a prior would fit.
    5. *Generate*: elsewhere many images match about equally well, and a prior must decide: GRNN for
       squares of 8 to 256 pixels, a power of two, with a second-order finish where the model is
       smooth; IG for other sizes, with the batch statistics where the capture holds them.

    Which attack serves which model was chosen on training digits and photographs that no benchmark
    scores: through max pooling the finish gained 0.2 dB. Losses are relative squared residuals but
    for `Statistics` and closed forms; where the evidence has a likelihood they are those of the
    posterior (`minimise`).

    Attributes
    ----------
    max_unknowns
        Most pixels that are solved for.
    closed_forms
        Whether the first stage runs.
    """

    name: ClassVar[str] = "best"
    title: ClassVar[str] = "Best recipe"
    inputs: ClassVar[tuple[str, ...]] = ("image", "signal")
    competes: ClassVar[bool] = True
    portfolio: ClassVar[bool] = True
    iterations: ClassVar[int] = 2000

    max_unknowns: Count = 4096
    closed_forms: bool = True

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return what is run, in order."""
        return (
            Stage("closed form", self._alone, self._read_off, _read_off, 0.0),
            Stage(
                "readings",
                _through_depth,
                _where_read,
                _inverted,
                _READING_SHARE,
                near=_inverted_in_part,
            ),
            Stage("statistics", _decided_by_statistics, _run(Statistics()), _matched, 0.5),
            Stage(
                "solve",
                self._solvable,
                _run(GaussNewton(max_unknowns=self.max_unknowns)),
                _solved,
                0.3,
                GaussNewton.iterations,
            ),
            Stage("generate", _always, self._generate, _kept, 1.0, guesses=True),
        )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Hand each trial from stage to stage until one of them is done with it."""
        found: Outcome | None = None
        rest, near = list(range(problem.trials)), set[int]()
        spent, left = 0.0, run.iterations
        for stage in self.stages:
            if stage.guesses:
                rest = [trial for trial in rest if trial not in near]
            if not rest:
                break
            part = problem if len(rest) == problem.trials else problem.select(rest)
            if not stage.applies(part):
                continue
            limits, after = _limits(stage, run, spent, left)
            begun = time.perf_counter()
            made = stage.solve(part, limits)
            if made is None:
                if run.seconds is not None:
                    spent += min(stage.share, (time.perf_counter() - begun) / run.seconds)
                continue
            left = after
            spent += stage.share
            methods = [recipe.method for recipe in made.recipes]
            results = dict(zip(rest, zip(methods, made.losses.tolist(), strict=True), strict=True))
            done = {t for t, result in results.items() if stage.done(*result, problem.target_model)}
            better = [row for row, trial in enumerate(rest) if trial in done or trial not in near]
            taken = [rest[row] for row in better]
            found = made if found is None else found.replaced(taken, made, better)
            near |= {trial for trial, result in results.items() if stage.near(*result)}
            rest = [trial for trial in rest if trial not in done]
        assert found is not None
        run.advance(1.0, float(found.losses.min()))
        return found

    def after_closed_forms(self) -> Best:
        """Return the stages that follow the closed forms."""
        return replace(self, closed_forms=False)

    def prior(self) -> Attacker | None:
        """Return the generator alone, or total variation where it cannot make the size."""
        return _BestPrior(unroll=self.unroll)

    def _alone(self, problem: Problem) -> bool:
        return self.closed_forms and problem.image_shape[0] == 1

    def _solvable(self, problem: Problem) -> bool:
        loss = problem.target_model.loss
        if loss.values and loss.labelled and problem.image_shape[0] > 1:
            return False
        noisy = any(case.evidence.noisy for case in problem.cases)
        if noisy or not problem.target_model.traits.smooth:
            return False
        return math.prod(problem.image_shape) <= self.max_unknowns

    def _read_off(self, problem: Problem, run: Run) -> Outcome | None:
        """Read off what closed forms explain; trials of one observation share the result."""
        seconds = None if run.seconds is None else _READ_OFF_SHARE * run.seconds / problem.trials
        kind = problem.cases[0].observation.declaration.input
        attacks = [
            self._set_up(name)
            for name in _closed_forms_of_one_image()
            if kind in ATTACKS[name].inputs
        ]
        read: dict[int, Outcome | None] = {}
        for trial, case in enumerate(problem.cases):
            if (seen := id(case.observation)) not in read:
                alone = problem.select([trial])
                tried = (_explained(one, alone, seconds) for one in attacks)
                read[seen] = next((outcome for outcome in tried if outcome is not None), None)
        return _beside_each_other(problem, [read[id(case.observation)] for case in problem.cases])

    def _set_up(self, name: str) -> Attack:
        given = {"max_unknowns": self.max_unknowns, "unroll": self.unroll}
        known = ATTACKS[name].__dataclass_fields__
        found = attack(name, **{key: value for key, value in given.items() if key in known})
        assert isinstance(found, Attack)
        return found

    def _generate(self, problem: Problem, run: Run) -> Outcome:
        generated = _can_generate(problem)
        if generated and problem.target_model.traits.smooth:
            return _run(GRNNPolish(max_unknowns=self.max_unknowns))(problem, run)
        recipe = GRNN(labels=_labels(problem)) if generated else IG(bn=statistics_weight(problem))
        found = _run(recipe)(problem, run)
        if problem.likelihood is not None:
            return found
        simulated = problem.simulate(found.images, found.labels, found.unknowns)
        found.losses = problem.distance(RelativeError(), simulated).detach()
        return found


def _labels(problem: Problem) -> Literal["single", "infer"]:
    """Infer the labels of batches behind deep networks, where a search finds no images either.

    `experiments.peers` compares both through a ResNet-20 (``--split choose --batch 4 --attack grnn
    --attack best``).
    """
    if problem.image_shape[0] == 1 or not _through_depth(problem):
        return "single"
    try:
        hard_labels(problem)
        sources = {infer_labels(case).source for case in problem.cases}
    except BractError:
        return "single"
    # Without a bias in the last layer a label of four is wrong.
    return "single" if "weight" in sources else "infer"


def _competing() -> tuple[str, ...]:
    return tuple(name for name in ATTACKS if ATTACKS[name].competes)


@ATTACKS.register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Attacker):
    """The strongest of several attacks, found for each observation without the truth.

    1. The labels are read.
    2. Closed forms are tried, the cheapest first. An observation whose match reaches the rounding
       of the captured numbers is done, and so is one that `Best` would keep.
    3. Every attack of the pool from every start is a configuration of successive halving
       (Jamieson and Talwalkar 2016, algorithm 1): with n configurations there are ``ceil(log2 n) +
       1`` passes, each of which keeps half of the configurations and gives them twice the
       iterations. The last pass gives one configuration the whole budget, so the choice costs about
       as many full attacks as there are passes. Passes start afresh, since the schedules of most
       attacks depend on where they end.

    See `Contest` for how configurations are compared. Every trial stays in the result, so the
    *oracle* pick shows what a better choice would have got.

    A budget in iterations is that of the last pass; one in seconds is shared by all passes.

    Attributes
    ----------
    pool
        Names of the attacks that compete; None takes those that suit a case
        (`Attacker.suits`), such as the attack on heads where the backbone is frozen.
    """

    name: ClassVar[str] = "auto"
    title: ClassVar[str] = "Auto"
    inputs: ClassVar[tuple[str, ...]] = ("image", "table", "text", "signal")
    portfolio: ClassVar[bool] = True

    pool: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.pool or ():
            if name in elsewhere("bract.attacks") and name not in ATTACKS:
                raise ATTACKS.missing(name)
            if name == self.name or name not in ATTACKS:
                raise BractError(
                    f"auto cannot choose {name!r}; give names of other attacks", code="config-value"
                )

    def prior(self) -> Attacker | None:
        """Return that of the first attack in the pool that has one."""
        priors = (attack(name).prior() for name in self.pool or _competing())
        return next((found for found in priors if found is not None), None)

    def needs(self, observation: Observation) -> frozenset[str] | None:
        """Return what those of the pool read that handle the input, together."""
        kind = observation.declaration.input
        pool = self.pool or _competing()
        own = [attack(n).needs(observation) for n in pool if kind in ATTACKS[n].inputs]
        named = [names for names in own if names is not None]
        return frozenset().union(*named) if named and len(named) == len(own) else None

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack each case with what suits it best; configurations of one kind run as one batch."""
        by_input: dict[str, list[int]] = {}
        for place, case in enumerate(cases):
            by_input.setdefault(case.observation.declaration.input, []).append(place)
        found: dict[int, Reconstruction | Refusal] = {}
        for kind, places in by_input.items():
            try:
                results = self._run_alike([cases[place] for place in places], task, kind)
            except CutOffError as cut:
                cut.found += [one for one in found.values() if isinstance(one, Reconstruction)]
                raise
            found |= dict(zip(places, results, strict=True))
        return [found[place] for place in range(len(cases))]

    def _run_alike(
        self, cases: Sequence[Case], task: AttackTask, kind: str
    ) -> list[Reconstruction | Refusal]:
        """Attack cases of one input with those of the pool that handle it."""
        starts = task.budget.restart_numbers
        pools = [self._suiting(case, kind) for case in cases]
        if not all(pools):
            reason = f"no attack of auto's pool handles the input {kind}"
            return [
                Refusal(attack=self.name, observation=c.observation.key, reason=reason)
                for c in cases
            ]
        contests = [
            Contest([Configuration(name, start) for name in pool for start in starts])
            for pool in pools
        ]
        tournament = Tournament(cases, contests, task)
        labels = tournament.attempt(LabelInference(), range(len(cases)), Budget())
        try:
            self._compete(cases, contests, tournament, kind)
        except CutOffError as cut:
            tournament.keep_found(cut.found)
            results = self._results(cases, contests, labels, task)
            cut.found = [one for one in results if isinstance(one, Reconstruction)]
            raise
        return self._results(cases, contests, labels, task)

    def _suiting(self, case: Case, kind: str) -> list[str]:
        """Return the attacks that compete for a case."""
        names = [name for name in self.pool or ATTACKS if kind in ATTACKS[name].inputs]
        if self.pool is not None:
            return names
        return [name for name in names if attack(name).suits(case)]

    def _compete(
        self,
        cases: Sequence[Case],
        contests: Sequence[Contest],
        tournament: Tournament,
        kind: str,
    ) -> None:
        """Try closed forms, and let the configurations of all contests play their passes."""
        counts = [len(contest.configurations) for contest in contests]
        for name in (form for form in closed_forms() if kind in ATTACKS[form].inputs):
            tournament.try_closed_form(name)
        for case, contest in zip(cases, contests, strict=True):
            contest.read_off = _is_read_off(case, contest)
        passes = math.ceil(math.log2(max(counts, default=1))) + 1
        for number in range(1, passes + 1):
            for contest, count in zip(contests, counts, strict=True):
                contest.halve(math.ceil(count / 2 ** (number - 1)))
            tournament.play(number, passes)
        if not any(contest.configurations for contest in contests):
            tournament.report_done()

    def _results(
        self,
        cases: Sequence[Case],
        contests: Sequence[Contest],
        labels: Sequence[Reconstruction | Refusal],
        task: AttackTask,
    ) -> list[Reconstruction | Refusal]:
        return [
            self._result(case, contest, read, task)
            for case, contest, read in zip(cases, contests, labels, strict=True)
        ]

    def _result(
        self, case: Case, contest: Contest, labels: Reconstruction | Refusal, task: AttackTask
    ) -> Reconstruction | Refusal:
        key = case.observation.key
        if not contest.trials:
            reasons = dict.fromkeys(
                contest.reasons[name]
                for name in self.pool or ATTACKS
                if name in contest.reasons and (self.pool or not ATTACKS[name].closed_form)
            )
            return Refusal(attack=self.name, observation=key, reason="; ".join(reasons))
        chosen = contest.best()
        read = labels.labels.tolist() if isinstance(labels, Reconstruction) else None
        decided: dict[str, Any] = {"criterion": contest.criterion, "labels_read": read}
        return Reconstruction(
            attack=self.name,
            observation=key,
            tier=task.tier,
            seed=task.seed,
            trials=tuple(contest.trials),
            chosen=chosen,
            seconds=case.seconds + sum(trial.seconds for trial in contest.trials),
            not_applicable=dict(contest.reasons),
            settings=contest.trials[chosen].settings | decided,
        )


@dataclass(frozen=True, kw_only=True)
class _BestPrior(Attack):
    name: ClassVar[str] = Best.name
    iterations: ClassVar[int] = Best.iterations

    @property
    def matches(self) -> bool:
        """Nothing is matched."""
        return False

    def solve(self, problem: Problem, run: Run) -> Outcome:
        recipe = GRNN() if _can_generate(problem) else IG()
        alone = recipe.prior()
        assert isinstance(alone, Attack)
        return alone.solve(problem, run)


def _limits(stage: Stage, run: Run, spent: float, left: int | None) -> tuple[Run, int | None]:
    """Return a stage's part of the run, and the iterations that are left after it."""
    end = min(1.0, spent + stage.share)
    if not stage.share or (spent == 0.0 and end == 1.0):
        return run, left
    steps = left if stage.iterations is None else stage.iterations
    if stage.iterations is None and left is not None and end < 1.0:
        steps = max(1, round(stage.share * left))
        left = max(1, left - steps)
    return run.part(stage.name, spent, end, steps), left


def explains(name: str, loss: float, target_model: TargetModel) -> bool:
    """Return whether an image that a closed form read off a model is kept, by its loss."""
    own = ATTACKS[name].explained
    if own is not None:
        return loss < own
    return loss < (SOLVED if target_model.traits.smooth else EXPLAINED)


def _read_off(_: str, loss: float, __: TargetModel) -> bool:
    return math.isfinite(loss)


def _matched(_: str, loss: float, __: TargetModel) -> bool:
    return loss < MATCHED


def _solved(_: str, loss: float, __: TargetModel) -> bool:
    return loss < SOLVED


def _kept(_: str, __: float, ___: TargetModel) -> bool:
    return True


def _always(_: Problem) -> bool:
    return True


def _through_depth(problem: Problem) -> bool:
    traits = problem.target_model.traits
    return problem.likelihood is None and not traits.smooth and not traits.shallow


def _inverted(method: str, loss: float, _: TargetModel) -> bool:
    kind = ATTACKS.get(method)
    below = kind.found_below if kind and issubclass(kind, InvertingAttack) else None
    return below is not None and loss < below


def _inverted_in_part(method: str, loss: float) -> bool:
    nearer = ATTACKS[method].nearer if method in ATTACKS else None
    return nearer is not None and loss < nearer


class _Read(NamedTuple):
    """The reading of one trial by an attack."""

    method: InvertingAttack
    entered: Entered


def _where_read(problem: Problem, run: Run) -> Outcome | None:
    """Invert what entered a layer, of trials whose captures tell it; None where none does.

    Every observation is read once by each attack. Trials whose best reading is one attack's are one
    batch with a checkpoint of its own.
    """
    begun = time.perf_counter()
    read = _best_readings(problem, run.seconds)
    problem.target_model.model.to(problem.device)
    alone: list[Outcome | None] = [None] * problem.trials
    names = list(dict.fromkeys(one.method.name for one in read if one is not None))
    for name in names:
        chosen = {trial: one for trial, one in enumerate(read) if one and one.method.name == name}
        method, trials = next(iter(chosen.values())).method, list(chosen)
        members = sha256(repr(trials).encode()).hexdigest()[:8]
        part = left_of(run.part(f"read-{members}", 0.0, 1.0, run.iterations), begun)
        whole = len(trials) == problem.trials
        given = problem if whole else problem.select(trials)
        entered = [one.entered for one in chosen.values()]
        found = method.inverted(given, part, entered).made_by(name)
        if whole:
            return found
        for row, trial in enumerate(trials):
            alone[trial] = found.trial(row)
    return _beside_each_other(problem, alone)


def _best_readings(problem: Problem, seconds: float | None) -> list[_Read | None]:
    """Return what the update of each trial determines best, of all that attacks read of it."""
    begun, best = time.perf_counter(), list[_Read | None]([None] * problem.trials)
    for method in _inverting():
        left = None if seconds is None else seconds - (time.perf_counter() - begun)
        if left is not None and left <= 0.0:
            break
        suiting = [trial for trial, case in enumerate(problem.cases) if _suits(method, case)]
        if not suiting:
            continue
        found = method.read_each(problem.select(suiting), left)
        for trial, entered in zip(suiting, found, strict=True):
            known = best[trial]
            if isinstance(entered, Entered) and (
                known is None or entered.certificate.order > known.entered.certificate.order
            ):
                best[trial] = _Read(method, entered)
    return best


def _inverting() -> list[InvertingAttack]:
    """Return the attacks that read what entered a layer, and know when images are those."""
    made = [attack(name) for name in ATTACKS if issubclass(ATTACKS[name], InvertingAttack)]
    return [one for one in made if isinstance(one, InvertingAttack) and one.found_below is not None]


def _suits(method: InvertingAttack, case: Case) -> bool:
    try:
        method.prepare(case)
    except OF_ONE_CASE:
        return False
    return True


def _decided_by_statistics(problem: Problem) -> bool:
    if problem.target_model.traits.smooth:
        return False
    own = OwnStatistics.of(problem)
    return own is not None and own.decisive(pixels=math.prod(problem.image_shape))


def statistics_weight(problem: Problem) -> float:
    """Weight of the client's own statistics in IG, 0 where a capture does not hold them."""
    own = (local_statistics(case.observation, case.target_model) for case in problem.cases)
    return BN_WEIGHT if all(one is not None for one in own) else 0.0


def _can_generate(problem: Problem) -> bool:
    *_, height, width = problem.image_shape
    return height == width and width in _GENERATED


def _run(method: Attack) -> Callable[[Problem, Run], Outcome]:
    return lambda problem, run: method.solve(problem, run).made_by(method.name)


def _closed_forms_of_one_image() -> list[str]:
    """Return the closed forms that need one image alone, and so explain the whole update."""
    return [
        name
        for name in closed_forms()
        if ATTACKS[name].batches == "one" and issubclass(ATTACKS[name], Attack)
    ]


def _is_read_off(case: Case, contest: Contest) -> bool:
    names = _closed_forms_of_one_image()
    return any(
        t.attack in names and explains(t.attack, t.loss, case.target_model) for t in contest.trials
    )


def _explained(method: Attack, problem: Problem, seconds: float | None) -> Outcome | None:
    """Return what a closed form reads off one trial; None where it does not explain it."""
    try:
        method.prepare(problem.cases[0])
        found = method.solve(problem, Run(iterations=None, seconds=seconds))
    except OF_ONE_CASE:
        return None
    kept = explains(method.name, float(found.losses[0]), problem.target_model)
    return found.made_by(method.name) if kept else None


def _beside_each_other(problem: Problem, outcomes: list[Outcome | None]) -> Outcome | None:
    """Return trials of one image each as one outcome; those not read off have an infinite loss."""
    if all(one is None for one in outcomes):
        return None
    shape, classes = problem.image_shape, problem.classes
    blank = Outcome(
        images=torch.zeros(1, *shape, dtype=torch.float64, device=problem.device),
        labels=torch.zeros(1, shape[0], classes, dtype=torch.float64, device=problem.device),
        losses=torch.full((1,), math.inf, dtype=torch.float64, device=problem.device),
    ).made_by("")
    found = [one or blank for one in outcomes]
    return Outcome(
        images=torch.cat([one.images.to(torch.float64) for one in found]),
        labels=torch.cat([one.labels.to(torch.float64) for one in found]),
        losses=torch.cat([one.losses.to(torch.float64) for one in found]),
        curves=[curve for one in found for curve in one.curves],
        iterations=max(one.iterations for one in found),
        recipes=[recipe for one in found for recipe in one.recipes],
    )
