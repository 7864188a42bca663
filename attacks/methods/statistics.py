"""Invert the batch statistics that a client returns with its update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bract.attacks.base import Attack, Cost
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run, descend
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.local_statistics import local_statistics
from bract.attacks.solve.matching import hard_labels, noise
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.solve.pixels import EnlargedPixels, resized
from bract.attacks.solve.regularizers import TotalVariation
from bract.errors import BractError
from bract.protocol.update import Tensors

_SPREAD = 0.3
_COARSEST = 8
_COARSE_SHARE = 0.15


@ATTACKS.register("statistics")
@dataclass(frozen=True, kw_only=True)
class Statistics(Attack):
    """Images whose batch statistics are those that the client's returned buffers give.

    A client that normalises by its batch, takes one step and sends its buffers back reveals mean
    and variance of every channel that enters a normalisation layer: 1,376 numbers of a ResNet-20.
    They are continuous in the pixels where a gradient jumps (ReLU, max pooling), and no defense of
    the update touches them. GradInversion (Yin et al. 2021, eq. 8) and DeepInversion hold running
    statistics against candidates as a prior in addition to the gradient; here the batch's own are
    the target, and after several steps their weighted mean
    (`bract.attacks.solve.local_statistics`). Quasi-Newton descent on `OwnStatistics.error` plus
    total variation, from an eighth of the size or more to the whole, finished with less of the
    prior. The update enters nothing but the labels, and of longer training the way of the model.

    Attributes
    ----------
    tv
        Weight of total variation while coarse and at first.
    finish
        What multiplies it in the last stage.
    history
        Pairs that L-BFGS keeps.
    """

    name: ClassVar[str] = "statistics"
    title: ClassVar[str] = "Batch statistics"
    family: ClassVar[str] = "matching with batch statistics"
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 600

    tv: float = 2e-2
    finish: float = 0.1
    history: int = 50

    def prepare(self, case: Case) -> Case:
        """Refuse captures that do not hold the statistics of one batch."""
        case = super().prepare(case)
        if local_statistics(case.observation, case.target_model) is None:
            raise BractError(
                f"{case.observation.key}: the buffers do not give the statistics of the client's "
                "batches; that takes batch normalisation in norm_mode 'train', and buffers that "
                "are returned with their counts; use another attack"
            )
        return case

    @property
    def matches(self) -> bool:
        """The update is not matched, so unknowns of the client are not searched."""
        return False

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Descend stage by stage; each begins with what the last one found."""
        wanted = OwnStatistics.of(problem)
        assert wanted is not None
        size, labels = problem.image_shape[-1], hard_labels(problem)
        images, channels = problem.image_shape[:2]
        stages = self._stages(size)
        side = stages[0][0]
        logits = _SPREAD * noise(problem, images, channels, side, side)
        begun = 0.0
        for number, (side, tv, share) in enumerate(stages):
            search = EnlargedPixels(resized(logits, side), size, labels, logits=True)
            prior = TotalVariation(weight=tv)

            def loss(
                images: Tensor, labels: Tensor, unknowns: Tensors, prior: TotalVariation = prior
            ) -> Tensor:
                del unknowns
                return wanted.error(problem, images, labels) + prior(problem, images)

            iterations = None if run.iterations is None else max(1, round(run.iterations * share))
            part = run.part(f"stage-{number}", begun, min(1.0, begun + share), iterations)
            optimizer = BatchedLBFGS(search.variables, history=self.history)
            found = descend(problem, search, optimizer, loss, part, {})
            logits = search.values.detach()
            begun += share
        unknowns = {name: value.detach() for name, value in problem.unknowns().items()}
        found.unknowns = unknowns
        components = ("batch statistics", *search.components, "total variation")
        return found.made_by("", *components, *BatchedLBFGS.components)

    def _stages(self, size: int) -> list[tuple[int, float, float]]:
        """Side in pixels, weight of total variation and share of the run, stage by stage."""
        coarse = [side for side in (size // 4, size // 2) if side >= _COARSEST]
        fine = (1.0 - _COARSE_SHARE * len(coarse)) / 2
        return [
            *((side, self.tv, _COARSE_SHARE) for side in coarse),
            (size, self.tv, fine),
            (size, self.tv * self.finish, fine),
        ]
