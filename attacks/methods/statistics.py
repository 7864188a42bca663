"""Invert the batch statistics that a client returns with its update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from bract.attacks.methods.enlarging import EnlargingAttack
from bract.attacks.options import Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.local_statistics import local_statistics
from bract.attacks.solve.matching import hard_labels
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.stage import STATISTICS, Stage
from bract.errors import BractError

MATCHED = 0.02
"""Loss below which images are kept. Chosen on images that no benchmark scores: through a fresh
ResNet-20 four photographs end at 5e-5 to 8e-3 with 11 to 34 dB, three digits at 0.04 to 0.1 with 8
to 12 dB."""


@ATTACKS.register("statistics")
@dataclass(frozen=True, kw_only=True)
class Statistics(EnlargingAttack):
    """Images whose batch statistics are those that the client's returned buffers give.

    A client that normalises by its batch, takes one step and sends its buffers back reveals mean
    and variance of every channel that enters a normalisation layer: 1,376 numbers of a ResNet-20.
    They are continuous in the pixels where a gradient jumps (ReLU, max pooling), and no defense of
    the update touches them. GradInversion (Yin et al. 2021, eq. 8) and DeepInversion hold running
    statistics against candidates as a prior in addition to the gradient; here the batch's own are
    the target, and after several steps their weighted mean
    (`bract.attacks.solve.local_statistics`). Quasi-Newton descent on `OwnStatistics.error` plus
    total variation, from a quarter of the size or more to the whole, finished with less of the
    prior. The update enters nothing but the labels, and of longer training the way of the model.
    """

    name: ClassVar[str] = "statistics"
    title: ClassVar[str] = "Batch statistics"
    family: ClassVar[str] = "matching with batch statistics"
    stage: ClassVar[Stage | None] = STATISTICS
    found_below: ClassVar[float | None] = MATCHED

    tv: Weight = 2e-2

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for models with kinks, where the capture holds enough statistics."""
        own = None if problem.target_model.traits.smooth else OwnStatistics.of(problem)
        decisive = own is not None and own.decisive(pixels=math.prod(problem.image_shape))
        return self if decisive else None

    def prepare(self, case: Case) -> Case:
        """Refuse captures that do not hold the statistics of one batch."""
        case = super().prepare(case)
        if local_statistics(case.observation, case.target_model) is None:
            raise BractError(
                f"{case.observation.key}: the buffers do not give the statistics of the client's "
                "batches; that takes batch normalisation in norm_mode 'train', and buffers that "
                "are returned with their counts; use another attack",
                code="attack-evidence",
            )
        return case

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Descend on the distance of the statistics, coarse to fine."""
        wanted = OwnStatistics.of(problem)
        assert wanted is not None
        return self.descend(
            problem,
            run,
            hard_labels(problem),
            lambda images, labels: wanted.error(problem, images, labels),
            "batch statistics",
        )
