"""GradInversion: gradient matching with priors of deep models, by several starts together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks import (
    Attack,
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
from bract.attacks.base import Cost
from bract.attacks.options import Rate, Weight
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.solve.defaults import ModelDefault
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.solve.regularizers import (
    BatchNormStatistics,
    Prior,
    TotalVariation,
)
from bract.seeds import trial_seed
from bract_papers.gradinversion.group_consistency import GroupConsistency
from bract_papers.gradinversion.langevin import Langevin
from bract_papers.gradinversion.priors import OwnBatchStatistics, SquaredNorm, have_run


@dataclass(frozen=True, kw_only=True)
class GradInversion(Attack):
    """GradInversion (Yin et al., CVPR 2021): See through Gradients.

    Squared distance of gradients, total variation, the norm of the image, batch statistics, and
    the distance to the consensus of all restarts (`GroupConsistency`), by Adam with half a cosine
    and Langevin noise, from N(0, 1). Restarts run in one batch and hold each other together; a
    single one does without. Labels are read from the last layer as elsewhere, which also counts
    classes that occur twice.

    What differs from the paper: the distance is relative to the captured gradient's norm, so that
    one weight serves every model; pixels are boxed; there is no warm-up; registration is by whole
    pixels; and where returned buffers give the statistics of the client's own batches, they replace
    the running ones, channel by channel.

    Attributes
    ----------
    lr
        Step in normalised units; 0.1 in the paper.
    tv, norm, bn, group
        Weights of total variation, of the mean square of the normalised pixels, of batch
        statistics and of group consistency. None takes that of the model
        (`defaults`).
    langevin
        Deviation of the noise as a share of the step; 0.2 in the paper.
    objective
        The matching loss.
    """

    name: ClassVar[str] = "gradinversion"
    title: ClassVar[str] = "GradInversion"
    family: ClassVar[str] = "matching with batch statistics"
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 4800
    defaults: ClassVar[tuple[ModelDefault, ...]] = (
        ModelDefault("tv", "shallow", 1e-6, "as for IG: a fresh LeNet's cosine hardly differs"),
        ModelDefault(
            "tv",
            "deep",
            0.1,
            "two training photographs through a fresh ResNet-20: 13.0 dB, 12.6 dB with 0.01",
        ),
        ModelDefault(
            "group",
            "shallow",
            1e-4,
            "four restarts on four training photographs: 21.2 dB with 1e-3, 15.0 dB with 0.01",
        ),
        ModelDefault("group", "deep", 0.01, "Yin et al. 2021"),
    )
    coupled: ClassVar[bool] = True

    lr: Rate = 0.1
    tv: Weight | None = None
    norm: Weight = 1e-6
    bn: Weight = 10.0
    group: Weight | None = None
    langevin: Weight = 0.01
    objective: Objective = field(default_factory=RelativeError)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search in pixel space, all restarts of an upload together."""
        return self.for_model(problem.target_model.traits)._solve(problem, run)

    def _solve(self, problem: Problem, run: Run) -> Outcome:
        labels = hard_labels(problem)
        search = PixelSearch(problem, noise(problem, *problem.image_shape), labels)
        unknowns = problem.unknowns()
        inner = FirstOrder(
            search.variables | unknowns,
            FirstOrderSettings(kind="adam", lr=self.lr, schedule="cosine"),
        )
        optimizer = Langevin(
            inner,
            search.variables,
            [torch.Generator().manual_seed(trial_seed(s, "langevin", 0)) for s in problem.seeds],
            deviation=self.langevin,
            lr=self.lr,
            schedule="cosine",
            project=search.box,
        )
        return minimise(
            problem,
            search,
            optimizer,
            run,
            objective=self.objective,
            priors=self._priors(problem, labels),
            unknowns=unknowns,
        )

    def _priors(self, problem: Problem, labels: Tensor) -> list[Prior]:
        priors: list[Prior] = []
        if self.tv:
            priors.append(TotalVariation(weight=self.tv))
        if self.norm:
            priors.append(SquaredNorm(weight=self.norm))
        if self.bn:
            own = OwnStatistics.of(problem)
            if own is not None:
                priors.append(OwnBatchStatistics(weight=self.bn, own=own, labels=labels))
            elif have_run(problem):
                priors.append(BatchNormStatistics(weight=self.bn))
        if self.group:
            priors.append(GroupConsistency(weight=self.group, labels=labels.argmax(dim=2)))
        return priors
