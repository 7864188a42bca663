"""Read labels off an update, without any optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import hard_labels


@ATTACKS.register("labels")
@dataclass(frozen=True, kw_only=True)
class LabelInference(Attack):
    """Read the labels from the last layer's gradient; images stay grey.

    Exact for one example, counts for batches (see `bract.attacks.solve.labels.infer_labels`). It
    costs one forward pass, so an audit runs it before anything else. The loss is zero: there is
    nothing to choose between.
    """

    name: ClassVar[str] = "labels"
    title: ClassVar[str] = "Labels"
    batches: ClassVar[Batches] = "any"
    inputs: ClassVar[tuple[str, ...]] = ("image", "table", "text", "signal")
    cost: ClassVar[Cost] = "instant"
    labels_only: ClassVar[bool] = True
    iterations: ClassVar[int] = 1

    @property
    def matches(self) -> bool:
        """Nothing is matched, so that no unknowns of the client are searched."""
        return False

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Infer; nothing is optimised."""
        labels = hard_labels(problem)
        images = torch.full(
            (problem.trials, *problem.image_shape), 0.5, device=problem.device, dtype=problem.dtype
        )
        run.advance(1.0, 0.0)
        return Outcome(
            images=images,
            labels=labels,
            losses=torch.zeros(problem.trials, device=problem.device),
            unknowns=problem.unknowns(),
        ).made_by("", "labels analytic")
