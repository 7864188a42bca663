"""GRNN with a second-order finish on its pixels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from bract.attacks.base import Attacker
from bract.attacks.methods.gauss_newton import solve_from
from bract.attacks.methods.grnn.generator import makes_size
from bract.attacks.methods.grnn.grnn import GRNN
from bract.attacks.options import Count
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.matching import minimise
from bract.attacks.solve.pixels import PixelSearch
from bract.attacks.solve.regularizers import image_priors
from bract.attacks.stage import GENERATE, Stage

_SHARE = 0.8

_PRIORS = image_priors(tv=1.0, power=2, bn=0.0)
"""Of GRNN's kind; with a likelihood the prior in nats takes its place, whatever its weight."""


@ATTACKS.register("grnn-polish")
@dataclass(frozen=True, kw_only=True)
class GRNNPolish(GRNN):
    """GRNN, then Levenberg-Marquardt (or L-BFGS where that is too large) on its pixels.

    Against noise of a known law the finish is L-BFGS on the posterior (`minimise`): least squares
    without a prior would fit the noise.

    The generator's prior finds the right valley, the second-order finish its bottom. The budget's
    iterations are GRNN's; of a budget in seconds the finish gets a fifth. Losses are the relative
    squared residual after the finish.

    Attributes
    ----------
    polish_steps
        Steps of the finish.
    max_unknowns
        Above this many pixels ``B * C * H * W`` L-BFGS takes over.
    """

    name: ClassVar[str] = "grnn-polish"
    title: ClassVar[str] = "GRNN with polish"
    stage: ClassVar[Stage | None] = GENERATE
    relative: ClassVar[bool] = True

    polish_steps: Count = 30
    max_unknowns: Count = 4096

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for sizes that its generator makes, through smooth models."""
        smooth = problem.target_model.traits.smooth
        return self if smooth and makes_size(*problem.image_shape[2:]) else None

    def prior(self) -> Attacker | None:
        """GRNN's: the finish matches the gradient and nothing else."""
        inherited = {f.name: getattr(self, f.name) for f in fields(GRNN)}
        return GRNN(**inherited).prior()

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Train generators, then refine every trial's best images."""
        rough = super().solve(problem, run.part("grnn", 0.0, _SHARE, run.iterations))
        finish = run.part("finish", _SHARE, 1.0, self.polish_steps)
        return refine(problem, rough, finish, max_unknowns=self.max_unknowns)


def refine(problem: Problem, rough: Outcome, run: Run, *, max_unknowns: int) -> Outcome:
    """Continue from rough images in float64, with the likeliest labels held fixed."""
    labels = settled_labels(rough)
    images = rough.images.to(torch.float64).clamp(0.0, 1.0)
    noisy = problem.likelihood is not None
    solvable = rough.images[0].numel() <= max_unknowns and not noisy
    if solvable:
        found = solve_from(problem, images, labels, run, unknowns=rough.unknowns)
    else:
        exact = problem.to(torch.float64)
        search = PixelSearch(
            exact, exact.target_model.normalise(images), labels.to(torch.float64), None
        )
        unknowns = {
            name: value.detach().to(torch.float64).clone().requires_grad_()
            for name, value in rough.unknowns.items()
        }
        found = minimise(
            exact,
            search,
            BatchedLBFGS(search.variables | unknowns),
            run,
            objective=RelativeError(),
            priors=_PRIORS if noisy else (),
            unknowns=unknowns,
        )
    finish = "second order" if solvable else "quasi-Newton"
    return replace(found.after(rough), recipes=rough.recipes).made_by("", finish)


def settled_labels(rough: Outcome) -> Tensor:
    """One-hot rows of the likeliest labels ``(L, B, classes)``."""
    classes = rough.labels.shape[-1]
    return torch.nn.functional.one_hot(rough.labels.argmax(dim=-1), classes)
