"""Gradient inversion as nonlinear least squares, solved by Levenberg-Marquardt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from bract.attacks.base import Attack, Cost
from bract.attacks.options import Count, Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.levenberg_marquardt import SOLVED, Fit, levenberg_marquardt
from bract.attacks.solve.matching import hard_labels, noise
from bract.attacks.stage import SOLVE, Stage
from bract.errors import BractError
from bract.process import clock
from bract.updates.update import Tensors

_GREY = 0.5
_SPREAD = 0.2


__all__ = ["SOLVED", "GaussNewton", "solve_from"]


@ATTACKS.register("gauss-newton")
@dataclass(frozen=True, kw_only=True)
class GaussNewton(Attack):
    """Solve the matching equations for the pixels, in float64.

    An update has more coordinates than an image has pixels, and on a network without kinks they
    depend smoothly on them, so a few Gauss-Newton steps from a grey image find the image to the
    precision of the captured float32 numbers where first-order matching crawls. Kinks (max
    pooling, ReLU) spoil it; start it from another attack's result there (`GRNNPolish`). The loss
    is the relative squared residual; below `SOLVED` (1e-12) the update is explained completely.

    Attributes
    ----------
    max_unknowns
        Most pixels ``B * C * H * W`` that are solved for; time grows with their cube, memory with
        their square (32 bytes each).
    tolerance
        Stop when a step improves the residual by less than this, relatively.
    """

    name: ClassVar[str] = "gauss-newton"
    title: ClassVar[str] = "Gauss-Newton"
    family: ClassVar[str] = "gradient matching over pixels"
    inputs: ClassVar[tuple[str, ...]] = ("image", "signal")
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 40
    stage: ClassVar[Stage | None] = SOLVE
    relative: ClassVar[bool] = True

    max_unknowns: Count = 4096
    tolerance: Weight = 1e-3

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for smooth models, where one solution is to be expected."""
        loss, images = problem.target_model.loss, problem.image_shape[0]
        if loss.values and loss.labelled and images > 1:
            return None
        noisy = any(case.evidence.noisy for case in problem.cases)
        if noisy or not problem.target_model.traits.smooth:
            return None
        return self if math.prod(problem.image_shape) <= self.max_unknowns else None

    def require_model(self, case: Case) -> None:
        """Refuse what is too large to solve for."""
        super().require_model(case)
        unknowns = case.images * math.prod(case.target_model.image_shape)
        if unknowns > self.max_unknowns:
            raise BractError(
                f"{case.observation.key}: {unknowns} pixels to solve for, more than max_unknowns "
                f"({self.max_unknowns}); lower budget.max_images or use another attack",
                code="attack-unsuited",
            )

        if case.target_model.loss.values and case.target_model.loss.labelled and case.images > 1:
            raise BractError(
                f"{case.observation.key}: {self.name} needs the target of each of {case.images} "
                "examples, and of numbers the update shows their mean alone; attack with ig",
                code="attack-unsuited",
            )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Solve every trial; the first restart starts grey, later ones from noise."""
        start = _GREY + _SPREAD * noise(problem, *problem.image_shape)
        if problem.image_shape[0] == 1:
            first = torch.tensor([r == 0 for r in problem.restarts], device=problem.device)
            start = torch.where(first.view(-1, 1, 1, 1, 1), _GREY, start)
        labels = hard_labels(problem)
        return solve_from(problem, start, labels, run, tolerance=self.tolerance)


def solve_from(
    problem: Problem,
    start: Tensor,
    labels: Tensor,
    run: Run,
    *,
    unknowns: Tensors | None = None,
    tolerance: float = 1e-3,
) -> Outcome:
    """Run Levenberg-Marquardt in every trial, one after another, each from its own start.

    Once a restart has solved its observation, later ones of the same observation repeat it.
    """
    exact = problem.to(torch.float64)
    given = problem.unknowns() if unknowns is None else unknowns
    begun = clock.now()
    iterations = run.iterations or GaussNewton.iterations
    fits: list[Fit] = []
    solved: dict[str, Fit] = {}
    for trial in range(problem.trials):
        key = problem.cases[trial].observation.key
        if key in solved:
            fits.append(solved[key])
            continue
        deadline = None
        if run.seconds is not None:
            deadline = begun + run.seconds * (trial + 1) / problem.trials

        def report(step: int, loss: float, trial: int = trial) -> None:
            run.advance((trial + step / iterations) / problem.trials, loss)

        fits.append(
            levenberg_marquardt(
                exact.select([trial]),
                start[trial : trial + 1].to(torch.float64),
                labels[trial : trial + 1].to(torch.float64),
                {n: v[trial : trial + 1].detach().to(torch.float64) for n, v in given.items()},
                iterations=iterations,
                deadline=deadline,
                tolerance=tolerance,
                report=report,
            )
        )
        if fits[-1].loss < SOLVED:
            solved[key] = fits[-1]
    run.advance(1.0, min(fit.loss for fit in fits))
    return Outcome(
        images=torch.stack([fit.images for fit in fits]),
        labels=labels.to(torch.float64),
        losses=torch.tensor([fit.loss for fit in fits], dtype=torch.float64, device=problem.device),
        unknowns={n: torch.cat([fit.unknowns[n] for fit in fits]) for n in given},
        curves=[fit.curve for fit in fits],
        iterations=max(fit.curve[-1][0] for fit in fits),
    ).made_by("", "relative error matching", "pixels", "labels analytic", "second order")
