"""Outcomes of single trials as one outcome of all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bract.attacks.problem.problem import Problem
from bract.attacks.solve.descent import Outcome


def side_by_side(problem: Problem, outcomes: Sequence[Outcome | None]) -> Outcome | None:
    """Return trials as one outcome; those without one have an infinite loss."""
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
