"""The strongest attack on an upload, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from bract.attacks.base import Attack, Attacker
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.portfolio.best_reading import invert_best
from bract.attacks.methods.portfolio.ranking import found, is_read
from bract.attacks.methods.portfolio.reading_off import of_one_image, read_off
from bract.attacks.options import Count
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS, attack
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.stage import GENERATE, READ_OFF, READINGS, STAGES, Stage
from bract.process import clock


@ATTACKS.register("best")
@dataclass(frozen=True, kw_only=True)
class Best(Attack):
    """Solve where that is possible, generate where it is not: the first of `stages` that succeeds.

    Attacks say on their class in which of the stages (`bract.attacks.stage`) they take part.


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

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Hand each trial from stage to stage until one of them is done with it."""
        whole: Outcome | None = None
        rest, near = list(range(problem.trials)), set[int]()
        smooth = problem.target_model.traits.smooth
        spent, left = 0.0, run.iterations
        for stage in STAGES:
            if stage.guesses:
                rest = [trial for trial in rest if trial not in near]
            if not rest:
                break
            part = problem if len(rest) == problem.trials else problem.select(rest)
            attacks = self._taking_part(stage, part)
            if not attacks:
                continue
            limits, after = _limits(stage, attacks[0], run, spent, left)
            begun = clock.now()
            made = self._solve(stage, attacks, part, limits)
            if made is None:
                if run.seconds is not None:
                    spent += min(stage.share, (clock.now() - begun) / run.seconds)
                continue
            left = after
            spent += stage.share
            methods = [recipe.method for recipe in made.recipes]
            each = zip(methods, made.losses.tolist(), made.certificates, strict=True)
            results = dict(zip(rest, each, strict=True))
            done = {
                trial
                for trial, result in results.items()
                if stage.guesses or found(*result, smooth=smooth)
            }
            better = [row for row, trial in enumerate(rest) if trial in done or trial not in near]
            taken = [rest[row] for row in better]
            whole = made if whole is None else whole.replaced(taken, made, better)
            near |= {trial for trial, result in results.items() if is_read(*result, smooth=smooth)}
            rest = [trial for trial in rest if trial not in done]
        assert whole is not None
        run.advance(1.0, float(whole.losses.min()))
        return whole

    def after_closed_forms(self) -> Best:
        """Return the stages that follow the closed forms."""
        return replace(self, closed_forms=False)

    def prior(self) -> Attacker | None:
        """Return the generator alone, or total variation where it cannot make the size."""
        return _BestPrior(unroll=self.unroll)

    def _taking_part(self, stage: Stage, problem: Problem) -> list[Attack]:
        """Return the attacks of a stage that can do something for these trials, as they run."""
        kind = problem.cases[0].observation.declaration.input
        if stage is READ_OFF:
            alone = self.closed_forms and problem.image_shape[0] == 1
            names = of_one_image() if alone else []
        elif stage is READINGS:
            names = [name for name in ATTACKS if issubclass(ATTACKS[name], InvertingAttack)]
        else:
            names = [name for name in ATTACKS if ATTACKS[name].stage is stage]
        if not self.closed_forms:
            names = [name for name in names if not ATTACKS[name].closed_form]
        made = [self._set_up(name) for name in names if kind in ATTACKS[name].inputs]
        return [one for attack in made if (one := attack.for_best(problem)) is not None]

    def _solve(
        self, stage: Stage, attacks: list[Attack], problem: Problem, run: Run
    ) -> Outcome | None:
        """Attack trials in a stage; None where it reconstructs none of them."""
        if stage is READ_OFF:
            return read_off(problem, run, attacks)
        if stage is READINGS:
            readings = [one for one in attacks if isinstance(one, InvertingAttack)]
            return invert_best(problem, run, readings)
        made = attacks[0].solve(problem, run).made_by(attacks[0].name)
        if stage.guesses and not attacks[0].relative and problem.likelihood is None:
            made.losses = problem.residuals(made.images, made.labels, made.unknowns)
        return made

    def _set_up(self, name: str) -> Attack:
        given = {"max_unknowns": self.max_unknowns, "unroll": self.unroll}
        known = ATTACKS[name].__dataclass_fields__
        made = attack(name, **{key: value for key, value in given.items() if key in known})
        assert isinstance(made, Attack)
        return made


@dataclass(frozen=True, kw_only=True)
class _BestPrior(Attack):
    name: ClassVar[str] = Best.name
    iterations: ClassVar[int] = Best.iterations

    @property
    def matches(self) -> bool:
        """Nothing is matched."""
        return False

    def solve(self, problem: Problem, run: Run) -> Outcome:
        made = [attack(name) for name in ATTACKS if ATTACKS[name].stage is GENERATE]
        alone = next(
            one.prior()
            for one in made
            if isinstance(one, Attack) and one.for_best(problem) is not None
        )
        assert isinstance(alone, Attack)
        return alone.solve(problem, run)


def _limits(
    stage: Stage, first: Attack, run: Run, spent: float, left: int | None
) -> tuple[Run, int | None]:
    """Return a stage's part of the run, and the iterations that are left after it."""
    end = min(1.0, spent + stage.share)
    if not stage.share or (spent == 0.0 and end == 1.0):
        return run, left
    if stage.own_steps:
        return run.part(stage.name, spent, end, first.iterations), left
    steps = left
    if left is not None and end < 1.0:
        steps = max(1, round(stage.share * left))
        left = max(1, left - steps)
    return run.part(stage.name, spent, end, steps), left
