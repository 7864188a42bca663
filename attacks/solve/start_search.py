"""Choose where unknowns of the client begin: many starts, halved by residual, finished by second
order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bract.attacks.problem.problem import Problem
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.levenberg_marquardt import Fit, levenberg_marquardt
from bract.seeds import trial_seed
from bract.updates.update import Tensors

_SHARE = 0.5
"""Iterations of all starts of one pass together, as a share of those of the attack."""

_STEPS = 6
"""Gauss-Newton steps on the unknowns after each pass; they are few, so that a step is cheap."""

_FLIP_STEPS = 3
_BETTER = 0.99

Solve = Callable[[Problem, Run], Outcome]


def from_best_start(solve: Solve, problem: Problem, run: Run) -> Outcome:
    """Run an attack from the best of the starts that the forward model asks for.

    An attack that regresses numbers of the client with its images ends in a wrong valley from many
    starts, which its residual shows. So each trial first plays successive halving (Jamieson and
    Talwalkar 2016, algorithm 1): all starts get a short run of the attack itself, the half that
    matches best a run of twice the length, and so on. After each run the unknowns take a few
    Gauss-Newton steps at the images that it found, and those of the last one try the other sign of
    each value, since descent crosses zero hardly. The attack's own run, at its whole budget, then
    begins with these unknowns. Each pass takes half of the attack's iterations, over all starts.

    A forward model asks by its attribute ``starts``, and by ``either_sign`` for the other signs.
    Without unknowns the attack runs as it is, and so it does on a model with kinks: through max
    pooling a wrong lock is matched as well as the right one by an image that is a little worse, so
    that residuals choose nothing and the second order leads astray.
    """
    starts = int(getattr(problem.forward, "starts", 1))
    smooth = problem.target_model.traits.smooth
    if starts == 1 or not smooth or not problem.unknowns():
        return solve(problem, run)
    passes = math.ceil(math.log2(starts))
    share = passes * _SHARE / (1.0 + passes * _SHARE)
    found: list[Tensors] = []
    for trial in range(problem.trials):
        low, high = (share * (trial + n) / problem.trials for n in (0, 1))
        part = run.part(f"starts-{trial}", low, high, run.iterations)
        found.append(_best_start(solve, problem.select([trial]), part, starts))
    begun = {name: torch.cat([f[name] for f in found]) for name in found[0]}
    last = run.part("attack", share, 1.0, run.iterations)
    return solve(replace(problem, starts=begun), last)


def _best_start(solve: Solve, problem: Problem, run: Run, starts: int) -> Tensors:
    """Play the tournament of one trial; return the unknowns ``(1, ...)`` that won."""
    passes = math.ceil(math.log2(starts))
    several = problem.select([0] * starts)
    seeds = (trial_seed(problem.seeds[0], "start", number) for number in range(1, starts))
    several = replace(several, seeds=(problem.seeds[0], *seeds))
    number = 0
    while True:
        iterations = None
        if run.iterations is not None:
            iterations = max(1, round(_SHARE * run.iterations / several.trials))
        part = run.part(f"pass-{number}", number / passes, (number + 1) / passes, iterations)
        outcome = solve(several, part)
        fits = [_refined(several, outcome, trial) for trial in range(several.trials)]
        order = sorted(range(len(fits)), key=lambda i: fits[i].loss)
        if number == passes - 1:
            best = fits[order[0]]
            if getattr(problem.forward, "either_sign", False):
                best = _flipped(several, outcome, order[0], best)
            return best.unknowns
        kept = order[: math.ceil(len(order) / 2)]
        begun = {n: torch.cat([fits[i].unknowns[n] for i in kept]) for n in fits[0].unknowns}
        several = replace(several.select(kept), starts=begun)
        number += 1


def _refined(problem: Problem, outcome: Outcome, trial: int) -> Fit:
    unknowns = {n: v[trial : trial + 1].detach().double() for n, v in outcome.unknowns.items()}
    return _second_order(problem, outcome, trial, unknowns, _STEPS)


def _flipped(problem: Problem, outcome: Outcome, trial: int, fit: Fit) -> Fit:
    """Try the other sign of every value, one after the other; keep what matches better."""
    for name, value in fit.unknowns.items():
        for index in range(value.numel()):
            turned = fit.unknowns[name].clone()
            turned.view(-1)[index] *= -1.0
            tried = _second_order(
                problem, outcome, trial, fit.unknowns | {name: turned}, _FLIP_STEPS
            )
            if tried.loss < _BETTER * fit.loss:
                fit = tried
    return fit


def _second_order(
    problem: Problem, outcome: Outcome, trial: int, unknowns: Tensors, steps: int
) -> Fit:
    """Solve for the unknowns of one trial at its images."""
    exact = problem.select([trial]).to(torch.float64)

    def row(value: Tensor) -> Tensor:
        return value[trial : trial + 1].detach().double()

    images, labels = row(outcome.images).clamp(0.0, 1.0), row(outcome.labels)
    return levenberg_marquardt(
        exact,
        images,
        labels,
        unknowns,
        iterations=steps,
        hold_images=True,
        spread=getattr(problem.forward, "spread", None),
    )
