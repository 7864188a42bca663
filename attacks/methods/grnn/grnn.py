"""GRNN: a generator per observation, trained until its images explain the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from bract.attacks.base import Attack, Cost
from bract.attacks.methods.grnn.generator import GeneratorSearch, check_sides, makes_size
from bract.attacks.options import Count, Rate, ScheduleName, Share, Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.objectives import LayerWeighting, Objective, SquaredPlusNorm
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.defaults import ModelDefault
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.labels import infer_labels
from bract.attacks.solve.matching import certain_labels, hard_labels, minimise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.regularizers import image_priors
from bract.attacks.stage import GENERATE, Stage
from bract.errors import BractError


@ATTACKS.register("grnn")
@dataclass(frozen=True, kw_only=True)
class GRNN(Attack):
    """Generative Regression Neural Network (Ren et al. 2022; thesis, chapter 3), as published.

    The generator's weights are optimised so that the gradient of its images and labels matches
    the captured one: ``|dg|^2 + |dg| + tv * TV``. Its architecture is the only prior.

    Attributes
    ----------
    optimizer, lr, momentum, schedule
        RMSprop, 1e-4, 0.99 and constant in the paper.
    tv
        Weight of total variation of squared differences; None takes that of the model
        (`defaults`).
    bn
        Weight of batch-normalisation statistics; without effect on models that have none.
    latent, width
        See `bract.attacks.methods.grnn.generator.Generator`.
    labels
        How labels are found, by one rule for every tier: ``single`` reads that of one image from
        the last layer and finds those of a batch with the generator's label branch, ``branch``
        finds all of them so, as published, ``infer`` reads all of them.
    objective, weighting
        The matching loss and the weights of the layers in it.
    """

    name: ClassVar[str] = "grnn"
    title: ClassVar[str] = "GRNN"
    family: ClassVar[str] = "gradient matching through a generator"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 2000
    stage: ClassVar[Stage | None] = GENERATE
    defaults: ClassVar[tuple[ModelDefault, ...]] = (
        ModelDefault("tv", "shallow", 2e-3, "Ren et al. 2022: 1e-3, which their code doubles"),
        ModelDefault("tv", "deep", 2e-6, "Ren et al. 2022: 1e-6, which their code doubles"),
    )

    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    lr: Rate = 1e-4
    momentum: Share = 0.99
    schedule: ScheduleName = "constant"
    tv: Weight | None = None
    bn: Weight = 0.0
    latent: Count = 128
    width: Count = 32
    labels: Literal["single", "branch", "infer"] = "single"
    objective: Objective = field(default_factory=SquaredPlusNorm)
    weighting: LayerWeighting = "equal"

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for sizes that its generator makes, through models with kinks."""
        if problem.target_model.traits.smooth or not makes_size(*problem.image_shape[2:]):
            return None
        return replace(self, labels=_labels(problem))

    def require_model(self, case: Case) -> None:
        """Refuse images that the generator does not make."""
        super().require_model(case)
        try:
            check_sides(*case.target_model.image_shape[1:])
        except BractError as error:
            raise BractError(f"{case.observation.key}: {error}", code=error.code) from None

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Train one generator a trial."""
        tv = self.for_model(problem.target_model.traits).tv or 0.0
        known = None
        if self.labels != "branch":
            infer = self.labels == "infer"
            known = hard_labels(problem) if infer else certain_labels(problem)
        search = GeneratorSearch(problem, latent=self.latent, width=self.width, labels=known)
        unknowns = problem.unknowns()
        optimizer = FirstOrder(
            search.variables | unknowns,
            FirstOrderSettings(
                kind=self.optimizer, lr=self.lr, schedule=self.schedule, momentum=self.momentum
            ),
            sums=search.sums,
        )
        return minimise(
            problem,
            search,
            optimizer,
            run,
            objective=self.objective,
            priors=image_priors(tv=tv, power=2, bn=self.bn),
            weighting=self.weighting,
            unknowns=unknowns,
        )


def _labels(problem: Problem) -> Literal["single", "infer"]:
    """Infer the labels of batches behind deep networks, where a search finds no images either.

    `experiments.peers` compares both through a ResNet-20 (``--split choose --batch 4 --attack grnn
    --attack best``).
    """
    if problem.image_shape[0] == 1 or not problem.through_depth:
        return "single"
    try:
        hard_labels(problem)
        sources = {infer_labels(case).source for case in problem.cases}
    except BractError:
        return "single"
    # Without a bias in the last layer a label of four is wrong.
    return "single" if "weight" in sources else "infer"
