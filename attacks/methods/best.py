"""The strongest recipe for a model, within a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Attacker
from bract.attacks.methods.gauss_newton import SOLVED, GaussNewton
from bract.attacks.methods.grnn import GRNN
from bract.attacks.methods.grnn_polish import GRNNPolish
from bract.attacks.methods.ig import IG
from bract.attacks.methods.r_gap import RGAP
from bract.attacks.methods.statistics import Statistics
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.local_statistics import local_statistics
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.task import OF_ONE_CASE

BN_WEIGHT = 0.1
"""Chosen on training images after one step of local training with returned buffers: two digits
through lenet-strided-bn in 400 iterations 63 dB, against 49 dB with 0.01 and 35 dB without; two
photographs through resnet20 with ReLU in 250 iterations 9.6 dB, against 6.5 dB without. GRNN goes
without: weights from 0.01 to 1 changed neither by more than 0.2 dB."""

EXPLAINED = 0.01
"""Loss below which an image that `RGAP` read off a model with kinks is kept. On images that no
benchmark scores such a loss meant 30 to 100 dB, where GRNN's images of 12 and 17 dB left 0.07; from
a smooth model an image is kept if it is `SOLVED`."""

_SHARE = 0.3

_STATISTICS_SHARE = 0.5

MATCHED = 0.02
"""Loss of `Statistics` below which its images are kept. Chosen on images that no benchmark scores:
through a fresh ResNet-20 four photographs end at 5e-5 to 8e-3 with 11 to 34 dB, three digits at
0.04 to 0.1 with 8 to 12 dB."""


@ATTACKS.register("best")
@dataclass(frozen=True, kw_only=True)
class Best(Attack):
    """Solve where that is possible, generate where it is not.

    One image through a chain of layers is read off by `RGAP`; a trial that it explains is done.
    Where the model is smooth, Gauss-Newton goes first: a trial whose match reaches the rounding of
    the captured numbers (`bract.attacks.methods.gauss_newton.SOLVED`) is done. Elsewhere many
    images match about equally well, the lowest residual is not the best image, and a prior must
    decide: GRNN for images it can generate (squares of 8 to 256 pixels, a power of two), with a
    second-order finish where the model is smooth, IG for others. Which recipe serves which model
    was chosen on training digits and photographs that no benchmark scores: through max pooling
    the finish gained 0.2 dB, since the gradient jumps where a maximum changes place. Where the
    capture holds the batch statistics of the client's own step, and enough of them to decide
    (`OwnStatistics.decisive`), they alone are inverted through a model with kinks (`Statistics`);
    elsewhere IG matches them too. Losses are relative squared
    residuals but for `Statistics` and `RGAP`, and where the evidence has a likelihood: then nothing
    is solved without a prior, and losses are those of the posterior (`minimise`).

    Attributes
    ----------
    max_unknowns
        Most pixels that Gauss-Newton solves for.
    closed_form
        Whether `RGAP` goes first.
    """

    name: ClassVar[str] = "best"
    iterations: ClassVar[int] = 2000

    max_unknowns: int = 4096
    closed_form: bool = True

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Take each trial as far as it goes."""
        if self.closed_form and problem.image_shape[0] == 1:
            return self._after_recursion(problem, run)
        return self._search(problem, run)

    def _after_recursion(self, problem: Problem, run: Run) -> Outcome:
        """Read off what can be read; search the rest."""
        attack = RGAP(max_unknowns=self.max_unknowns, unroll=self.unroll)
        read: dict[str, Outcome | None] = {}
        for trial, case in enumerate(problem.cases):
            if (key := case.observation.key) not in read:
                seconds = None if run.seconds is None else _SHARE * run.seconds / problem.trials
                read[key] = _explained(attack, problem.select([trial]), seconds)
        found = [read[case.observation.key] for case in problem.cases]
        rest = [trial for trial, outcome in enumerate(found) if outcome is None]
        if len(rest) == problem.trials:
            return self._search(problem, run)
        searched = iter(_apart(self._search(problem.select(rest), run)) if rest else [])
        if not rest:
            run.tell(1.0, 0.0)
        return _side_by_side([next(searched) if one is None else one for one in found])

    def _search(self, problem: Problem, run: Run) -> Outcome:
        images, channels, height, width = problem.image_shape
        solvable = images * channels * height * width <= self.max_unknowns
        own = None if problem.target_model.traits.smooth else OwnStatistics.of(problem)
        if own is not None and own.decisive(pixels=images * channels * height * width):
            return self._by_statistics(problem, run)
        noisy = problem.likelihood is not None
        if noisy or not (solvable and problem.target_model.traits.smooth):
            return self._generate(problem, run)
        first = GaussNewton(max_unknowns=self.max_unknowns).solve(
            problem, run.part("solve", 0.0, _SHARE, GaussNewton.iterations)
        )
        rest = [i for i, loss in enumerate(first.losses.tolist()) if not loss < SOLVED]
        first = first.made_by(GaussNewton.name)
        if not rest:
            run.tell(1.0, float(first.losses.min()))
            return first
        second = self._generate(
            problem.select(rest), run.part("generate", _SHARE, 1.0, run.iterations)
        )
        return _merge(first, second, rest)

    def _by_statistics(self, problem: Problem, run: Run) -> Outcome:
        """Invert the statistics; where descent is caught far from them, generate instead."""
        share = _STATISTICS_SHARE
        iterations = None if run.iterations is None else max(1, round(share * run.iterations))
        first = Statistics().solve(problem, run.part("statistics", 0.0, share, iterations))
        first = first.made_by(Statistics.name)
        rest = [i for i, loss in enumerate(first.losses.tolist()) if not loss < MATCHED]
        if not rest:
            run.tell(1.0, float(first.losses.min()))
            return first
        iterations = None if run.iterations is None else max(1, run.iterations - (iterations or 0))
        second = self._generate(problem.select(rest), run.part("generate", share, 1.0, iterations))
        return _merge(first, second, rest)

    def prior(self) -> Attacker | None:
        """Return the generator alone, or total variation where it cannot make the size."""
        return _BestPrior(unroll=self.unroll)

    def _generate(self, problem: Problem, run: Run) -> Outcome:
        generated = _can_generate(problem)
        if generated and problem.target_model.traits.smooth:
            polished = GRNNPolish(max_unknowns=self.max_unknowns).solve(problem, run)
            return polished.made_by(GRNNPolish.name)
        recipe = GRNN() if generated else IG(bn=statistics_weight(problem))
        found = recipe.solve(problem, run).made_by(recipe.name)
        if problem.likelihood is not None:
            return found
        simulated = problem.simulate(found.images, found.labels, found.unknowns)
        found.losses = problem.distance(RelativeError(), simulated).detach()
        return found


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


def statistics_weight(problem: Problem) -> float:
    """Weight of the client's own statistics in IG, 0 where a capture does not tell them."""
    own = (local_statistics(case.observation, case.target_model) for case in problem.cases)
    return BN_WEIGHT if all(one is not None for one in own) else 0.0


def _can_generate(problem: Problem) -> bool:
    return problem.image_shape[-1] in (8, 16, 32, 64, 128, 256)


def _explained(attack: RGAP, problem: Problem, seconds: float | None) -> Outcome | None:
    """Return what `RGAP` reads off one trial; None where it refuses or does not explain it."""
    try:
        attack.prepare(problem.cases[0])
        found = attack.solve(problem, Run(iterations=None, seconds=seconds))
    except OF_ONE_CASE:
        return None
    explained = explains(float(found.losses[0]), problem.target_model)
    return found.made_by(attack.name) if explained else None


def explains(loss: float, target_model: TargetModel) -> bool:
    """Whether an image that `RGAP` read off a model is kept, by its loss."""
    return loss < (SOLVED if target_model.traits.smooth else EXPLAINED)


def _apart(outcome: Outcome) -> list[Outcome]:
    """Return each trial's outcome alone."""
    return [
        replace(
            outcome,
            images=outcome.images[trial : trial + 1],
            labels=outcome.labels[trial : trial + 1],
            losses=outcome.losses[trial : trial + 1],
            unknowns={n: v[trial : trial + 1] for n, v in outcome.unknowns.items()},
            curves=outcome.curves[trial : trial + 1],
            recipes=outcome.recipes[trial : trial + 1],
        )
        for trial in range(len(outcome.losses))
    ]


def _side_by_side(outcomes: list[Outcome]) -> Outcome:
    """Return trials as one outcome; the gradient of one image leaves nothing else unknown."""
    return Outcome(
        images=torch.cat([one.images.to(torch.float64) for one in outcomes]),
        labels=torch.cat([one.labels.to(torch.float64) for one in outcomes]),
        losses=torch.cat([one.losses.to(torch.float64) for one in outcomes]),
        unknowns={},
        curves=[curve for one in outcomes for curve in one.curves],
        iterations=max(one.iterations for one in outcomes),
        recipes=[recipe for one in outcomes for recipe in one.recipes],
    )


def _merge(first: Outcome, second: Outcome, trials: list[int]) -> Outcome:
    def replaced(old: Tensor, new: Tensor) -> Tensor:
        merged = old.clone()
        merged[trials] = new.to(old)
        return merged

    curves, recipes = list(first.curves), list(first.recipes)
    for trial, curve, recipe in zip(trials, second.curves, second.recipes, strict=True):
        curves[trial] = first.curves[trial] + [(first.iterations + s, v) for s, v in curve]
        recipes[trial] = recipe
    return Outcome(
        images=replaced(first.images, second.images),
        labels=replaced(first.labels, second.labels),
        losses=replaced(first.losses.to(torch.float64), second.losses),
        unknowns={n: replaced(v, second.unknowns[n]) for n, v in first.unknowns.items()},
        curves=curves,
        iterations=first.iterations + second.iterations,
        recipes=recipes,
    )
