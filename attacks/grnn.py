"""GRNN: a generator per observation, trained until its images explain the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from bract.attacks.defaults import for_model
from bract.attacks.descent import Outcome, Run
from bract.attacks.generator import GeneratorSearch
from bract.attacks.matching import Attack, certain_labels, hard_labels, minimise
from bract.attacks.objectives import LayerWeighting, Objective, SquaredPlusNorm
from bract.attacks.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.priors import image_priors
from bract.attacks.problem import Problem
from bract.attacks.registry import ATTACKS


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
        (`bract.attacks.defaults.MODEL_DEFAULTS`).
    bn
        Weight of batch-normalisation statistics; without effect on models that have none.
    latent, width
        See `bract.attacks.generator.Generator`.
    labels
        ``branch`` finds them with the generator's label branch, as published, unless the evidence
        knows them; ``infer`` reads them from the last layer first.
    objective, weighting
        The matching loss and the weights of the layers in it.
    """

    name: ClassVar[str] = "grnn"
    iterations: ClassVar[int] = 2000

    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    lr: float = 1e-4
    momentum: float = 0.99
    schedule: str = "constant"
    tv: float | None = None
    bn: float = 0.0
    latent: int = 128
    width: int = 32
    labels: Literal["branch", "infer"] = "branch"
    objective: Objective = field(default_factory=SquaredPlusNorm)
    weighting: LayerWeighting = "equal"

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Train one generator a lane."""
        tv = for_model(self, problem.model).tv or 0.0
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
