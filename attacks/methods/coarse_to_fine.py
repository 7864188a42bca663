"""Search many images at once, small ones first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from bract.attacks.base import Attack, Cost
from bract.attacks.options import Rate, Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.objectives import Objective, RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.training_path import TrainingPath
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.labels import last_layer
from bract.attacks.solve.matching import hard_labels, minimise, noise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import EnlargedPixels, Sides, parts_of, resized
from bract.attacks.solve.regularizers import TotalVariation
from bract.errors import BractError
from bract.updates.step_law import LINEAR

_COARSEST = 8
_FEATURES = 0.25
"""Least inputs of the last layer, as a share of an image's values, that are matched alone. On other
images and networks than are scored, 0.19 (a pooled LeNet) lost and 0.25 (colour photographs through
a strided one) gained."""
MOST_IMAGES = 128
"""Most images that are looked for at once."""
_MIXED = 2
"""Most images a class with which its row is matched alone."""
_START, _SPREAD = 0.3, 0.1
_TV_OF_HEAD = 0.03
"""Weight of total variation where the last layer alone is matched."""


@ATTACKS.register("coarse-to-fine")
@dataclass(frozen=True, kw_only=True)
class CoarseToFine(Attack):
    """Gradient matching on images whose size grows, for batches too large to be distinguished.

    A model of fewer weights than the batch has pixels leaves most of them open. Pixels of images
    that are enlarged fourfold, then twofold, are fewer than its weights, and a coarse image is a
    start from which the next stage goes on. The last stage leaves total variation to decide what
    the update does not. Adam with half a cosine in every stage, pixels boxed, labels inferred.

    Of long local training by SGD (`TrainingPath`) the last layer alone is matched, where the images
    have more values than the layers before it have weights, there are half as many classes as
    images or more, and it sees a quarter as many features as an image has values or more. Its
    update is ``sum_i (p_i - y_i) h_i^T`` over the images, so the row of a class tells the sum of
    the features of its images, at a place on the way that is found with them (`PLACE`): at small
    rates the middle, where the row is off by a hundredth. A class of one image so tells that image,
    as in `Maui`.

    Attributes
    ----------
    lr, tv
        Step in pixels of [0, 1] and weight of total variation, which `fine` multiplies in the
        last stage.
    shares
        Share of the iterations that each size takes: a quarter, half and all of the side. Sizes
        below 8 pixels are left out.
    objective
        The matching loss.
    """

    name: ClassVar[str] = "coarse-to-fine"
    title: ClassVar[str] = "Coarse to fine"
    family: ClassVar[str] = "gradient matching over pixels"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 800

    lr: Rate = 0.05
    tv: Weight = 0.1
    fine: Weight = 1.0
    shares: tuple[float, float, float] = (0.2, 0.4, 0.4)
    objective: Objective = field(default_factory=RelativeError)

    def suits(self, case: Case) -> bool:
        """Say yes to long training whose last layer tells its images apart."""
        return bool(_telling_head(_with_all(case, self.unroll)))

    def prepare(self, case: Case) -> Case:
        """Look for all images of the update where the last layer tells them apart."""
        case = super().prepare(case)
        whole = _with_all(case, self.unroll)
        return whole if _telling_head(whole) else case

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Descend size by size; each begins with what the last one found."""
        images, channels, *sides = problem.image_shape
        size = (sides[0], sides[1])
        labels = hard_labels(problem)
        head = _telling_head(problem.cases[0])
        tv = _TV_OF_HEAD if head else self.tv
        problem = _matching(problem, head) if head else problem
        unknowns = problem.unknowns()
        stages = self._stages(size)
        pixels = _START + _SPREAD * noise(problem, images, channels, *stages[0][0])
        begun, found = 0.0, None
        for number, (part, share) in enumerate(stages):
            search = EnlargedPixels(resized(pixels, part), size, labels)
            iterations = None if run.iterations is None else max(1, round(run.iterations * share))
            last = number == len(stages) - 1
            found = minimise(
                problem,
                search,
                FirstOrder(
                    search.variables | unknowns,
                    FirstOrderSettings(kind="adam", lr=self.lr, schedule="cosine"),
                    project=search.box,
                ),
                run.part(f"side-{part[1]}", begun, min(1.0, begun + share), iterations),
                objective=self.objective,
                priors=[TotalVariation(weight=tv * (self.fine if last else 1.0))],
                unknowns=unknowns,
            )
            pixels = search.values.detach()
            begun += share
        assert found is not None
        return found.made_by("", "last layer") if head else found

    def _stages(self, size: Sides) -> list[tuple[Sides, float]]:
        """Height and width in pixels and share of the run."""
        parts = [*parts_of(size, _COARSEST), size]
        kept = zip(parts, self.shares[-len(parts) :], strict=True)
        some = [(part, share) for part, share in kept if share]
        whole = sum(share for _, share in some)
        return [(part, share / whole) for part, share in some]


def _with_all(case: Case, unroll: int) -> Case:
    """Return the case with all images of the update, up to `MOST_IMAGES`."""
    count = images_in(case.observation.declaration, MOST_IMAGES + 1)
    most = case.images if count > MOST_IMAGES else count
    return case.simulating(unroll=unroll, max_images=max(most, case.images))


def _telling_head(case: Case) -> tuple[str, ...]:
    """Return the names of the last layer's parameters where it is to be matched alone."""
    forward, target = case.forward, case.evidence.target
    if not isinstance(forward, TrainingPath) or forward.optimizer not in LINEAR:
        return ()
    try:
        weight, bias = last_layer(case.target_model)
    except BractError:
        return ()
    if weight not in target:
        return ()
    head = tuple(name for name in (weight, bias) if name in target)
    before = sum(v.numel() for name, v in target.items() if name not in head)
    classes, features = target[weight].shape
    values = math.prod(case.target_model.image_shape)
    few = features < _FEATURES * values
    mixed = case.images > _MIXED * classes
    return () if few or mixed or case.images * values <= before else head


def _matching(problem: Problem, names: tuple[str, ...]) -> Problem:
    """Return the problem with some parameters matched alone, at a place that is searched."""
    forward = problem.forward
    assert isinstance(forward, TrainingPath)
    alone = replace(forward, only=names, place_searched=True)
    return replace(
        problem,
        cases=tuple(replace(case, forward=alone) for case in problem.cases),
        target={name: problem.target[name] for name in names},
    )
