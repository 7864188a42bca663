"""Inverting Gradients (IG): cosine matching on pixels with total variation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from bract.attacks.base import Attack, Cost
from bract.attacks.methods.grnn.generator import makes_size
from bract.attacks.options import Rate, ScheduleName, Weight
from bract.attacks.problem.objectives import Cosine, LayerWeighting, Objective
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.defaults import ModelDefault
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.local_statistics import local_statistics
from bract.attacks.solve.matching import minimise, noise, searched_labels
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.attacks.solve.regularizers import image_priors
from bract.attacks.stage import GENERATE, Stage

BN_WEIGHT = 0.1
"""Chosen on training images after one step of local training with returned buffers: two digits
through lenet-strided-bn in 400 iterations 63 dB, against 49 dB with 0.01 and 35 dB without; two
photographs through resnet20 with ReLU in 250 iterations 9.6 dB, against 6.5 dB without. GRNN goes
without: weights from 0.01 to 1 changed neither by more than 0.2 dB."""


@ATTACKS.register("ig")
@dataclass(frozen=True, kw_only=True)
class IG(Attack):
    """Inverting Gradients (Geiping et al., NeurIPS 2020), kept to its published form.

    One cosine over all layers as one vector plus total variation; Adam on the *sign* of the
    gradient, taken after total variation is added; a tenth of the step after 3/8, 5/8 and 7/8 of
    the budget; pixels boxed to their valid range; N(0, 1) start; labels from the last layer.
    The best iterate is kept, with its own loss.

    Attributes
    ----------
    lr
        Step in normalised units; 0.1 in the paper.
    tv
        Weight of total variation on pixels in [0, 1]; None takes that of the model
        (`defaults`). The paper ranges from 1e-4 to 1e-1, for
        ResNets; the cosine of a fresh sigmoid LeNet differs from 1 by less than that at any
        image.
    bn
        Weight of batch-normalisation statistics; without effect on models that have none.
    signed, boxed
        As above; switch off for ablations.
    labels
        ``infer`` reads them from the last layer, ``joint`` optimises them with the images; either
        way alike for every tier of knowledge.
    objective, weighting
        The matching loss and the weights of the layers in it.
    schedule
        ``step`` as above, ``cosine`` or ``constant``.
    unknowns_rate
        What multiplies ``lr`` for unknowns of the forward model, which are not pixels.
    """

    name: ClassVar[str] = "ig"
    title: ClassVar[str] = "IG"
    family: ClassVar[str] = "gradient matching over pixels"
    inputs: ClassVar[tuple[str, ...]] = ("image", "signal")
    cost: ClassVar[Cost] = "seconds"
    competes: ClassVar[bool] = True
    iterations: ClassVar[int] = 4800
    stage: ClassVar[Stage | None] = GENERATE
    defaults: ClassVar[tuple[ModelDefault, ...]] = (
        ModelDefault(
            "tv",
            "shallow",
            1e-6,
            "the paper's prior, weak enough for a fresh LeNet's cosine: two training digits 31 dB, "
            "86 dB without",
            rectified=False,
        ),
        ModelDefault(
            "tv",
            "shallow",
            0.1,
            "ReLU: eight training photographs through the strided LeNet 23.3 dB, in batches of "
            "four 23.0 dB; 13.4 and 9.3 dB with 1e-6",
            rectified=True,
        ),
        ModelDefault("tv", "deep", 1e-4, "Geiping et al. 2020, published command line"),
    )

    lr: Rate = 0.1
    tv: Weight | None = None
    bn: Weight = 0.0
    signed: bool = True
    boxed: bool = True
    labels: Literal["infer", "joint"] = "infer"
    objective: Objective = field(default_factory=Cosine)
    weighting: LayerWeighting = "equal"
    schedule: ScheduleName = "step"
    unknowns_rate: Rate = 0.1

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack, with batch statistics, for sizes that no generator makes."""
        if makes_size(*problem.image_shape[2:]):
            return None
        return replace(self, bn=statistics_weight(problem))

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search in pixel space."""
        tv = self.for_model(problem.target_model.traits).tv or 0.0
        start = noise(problem, *problem.image_shape)
        known, logits = searched_labels(problem, joint=self.labels == "joint")
        search = PixelSearch(problem, start, known, logits)
        unknowns = problem.unknowns()
        optimizer = FirstOrder(
            search.variables | unknowns,
            FirstOrderSettings(
                kind="adam",
                lr=self.lr,
                schedule=self.schedule,
                signed=self.signed,
                rates=dict.fromkeys(unknowns, self.unknowns_rate),
            ),
            project=search.box if self.boxed else None,
        )
        return minimise(
            problem,
            search,
            optimizer,
            run,
            objective=self.objective,
            priors=image_priors(tv=tv, power=1, bn=self.bn),
            weighting=self.weighting,
            unknowns=unknowns,
        )


def statistics_weight(problem: Problem) -> float:
    """Return the weight of the client's own statistics, 0 where a capture does not hold them."""
    own = (local_statistics(case.observation, case.target_model) for case in problem.cases)
    return BN_WEIGHT if all(one is not None for one in own) else 0.0
