"""An attack: cosine matching on pixels, from a grey image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from bract.attacks import (
    Attack,
    Cosine,
    FirstOrder,
    FirstOrderSettings,
    Objective,
    Outcome,
    PixelSearch,
    Problem,
    Run,
    hard_labels,
    minimise,
    noise,
)


@dataclass(frozen=True, kw_only=True)
class FromGrey(Attack):
    """Match the direction of the gradient with Adam, from an image that is nearly grey.

    Attributes
    ----------
    lr
        Step in normalised units.
    spread
        Standard deviation of each restart's start around grey, in normalised units.
    objective
        The matching loss.
    """

    name: ClassVar[str] = "from-grey"
    inputs: ClassVar[tuple[str, ...]] = ("image", "stripes")
    iterations: ClassVar[int] = 1000

    lr: float = 0.05
    spread: float = 0.05
    objective: Objective = field(default_factory=Cosine)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search in pixel space with the labels read from the last layer."""
        spread = self.spread * noise(problem, *problem.image_shape)
        grey = problem.target_model.normalise(torch.full_like(spread, 0.5))
        search = PixelSearch(problem, grey + spread, hard_labels(problem))
        unknowns = problem.unknowns()
        optimizer = FirstOrder(
            search.variables | unknowns,
            FirstOrderSettings(kind="adam", lr=self.lr),
            project=search.box,
        )
        return minimise(
            problem, search, optimizer, run, objective=self.objective, unknowns=unknowns
        )
