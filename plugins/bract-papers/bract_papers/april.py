"""Search for the images behind a vision transformer's update, patches and their positions alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks import (
    Attack,
    Case,
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
from bract.attacks.base import Cost
from bract.attacks.options import Rate, Weight
from bract.attacks.problem.linear_layers import Projection, patch_layers, patch_projection
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.optimizers import BatchedOptimizer
from bract.attacks.solve.regularizers import Prior, TotalVariation
from bract.errors import BractError
from bract.updates.update import Tensors

_SPREAD = 0.05
"""Deviation of the pixels from grey where L-BFGS begins."""


@dataclass(frozen=True, kw_only=True)
class WithPositions:
    """Relative squared error, and one minus the cosine of the position embedding's gradients.

    ``|s - c|^2 / |c|^2 + alpha (1 - <s_p, c_p> / (|s_p| |c_p|))`` with p the position embedding
    (APRIL, Lu et al. 2022, equation 9, whose first term is not divided by the gradient's norm).

    Attributes
    ----------
    alpha
        Weight of the second term.
    position
        Name of the position embedding; None leaves the second term out.
    """

    component: ClassVar[str] = "relative error and cosine of positions matching"

    alpha: float
    position: str | None

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return the sum ``(L,)``."""
        error = RelativeError()(simulated, captured, weights)
        name = self.position
        if name is None or name not in captured:
            return error
        own = None if weights is None or name not in weights else {name: weights[name]}
        one, other = {name: simulated[name]}, {name: captured[name]}
        return error + self.alpha * Cosine()(one, other, own)


@dataclass(frozen=True, kw_only=True)
class PatchBorders:
    """Mean squared difference of neighbouring pixels of two patches (GradViT, 2022, equation 8).

    Patches enter the model one by one, so that nothing but the image itself makes their borders
    fit.

    Attributes
    ----------
    weight
        Factor before the penalty.
    owner
        Number of each pixel's patch, int64 ``(H, W)``.
    """

    weight: float
    owner: Tensor = field(compare=False, repr=False)

    def component(self, problem: Problem) -> str | None:
        """It applies to every problem with patches."""
        del problem
        return "patch borders"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``(L,)`` for images ``(L, B, C, H, W)`` in [0, 1]."""
        del problem
        owner = self.owner.to(images.device)
        total = images.new_zeros(len(images))
        for axis in (-1, -2):
            across = owner.diff(dim=axis) != 0
            apart = images.diff(dim=axis).square()[..., across]
            total = total + apart.flatten(1).mean(dim=1)
        return self.weight * total


@dataclass(frozen=True, kw_only=True)
class April(Attack):
    """Match gradients and the direction of the position embedding's (APRIL, Lu et al., CVPR 2022).

    The search variant, for what `patch-embedding` cannot solve: batches, fixed positions, other
    optimizers than SGD. The match is that of APRIL (`WithPositions`), with the labels read from
    the last layer, total variation, and GradViT's penalty on the borders of patches
    (`PatchBorders`; Hatamizadeh et al., CVPR 2022) in the place of its pre-trained networks.
    Descent is IG's, Adam on the sign of the gradient, in the range of pixels, or L-BFGS from grey.

    Attributes
    ----------
    lr
        Step in normalised units.
    alpha
        Weight of the positions' direction; without effect where positions are fixed.
    tv, borders
        Weights of total variation and of the borders of patches.
    signed
        Whether the sign of the gradient is followed.
    quasi_newton
        Descend by L-BFGS from grey instead, without a range of pixels; ``lr`` and ``signed`` have
        no effect then.
    objective
        The matching loss; None takes `WithPositions`.
    """

    name: ClassVar[str] = "april"
    title: ClassVar[str] = "APRIL"
    family: ClassVar[str] = "gradient matching over pixels"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 2000

    lr: Rate = 0.1
    alpha: Weight = 1.0
    tv: Weight = 1e-4
    borders: Weight = 1e-3
    signed: bool = True
    quasi_newton: bool = False
    objective: Objective | None = None

    def require_model(self, case: Case) -> None:
        """Refuse models without patches."""
        super().require_model(case)
        patch_projection(case.target_model, case.observation)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search in pixel space."""
        case = problem.cases[0]
        try:
            layers = patch_layers(case.target_model, case.observation)
            projection, position = layers.projection, layers.position.name
        except BractError:
            projection, position = patch_projection(case.target_model, case.observation), None
        problem.target_model.model.to(problem.device)
        _, channels, height, width = problem.image_shape
        priors: list[Prior] = [TotalVariation(weight=self.tv)] if self.tv else []
        if self.borders:
            owner = patch_of_each_pixel(projection, (channels, height, width))
            priors.append(PatchBorders(weight=self.borders, owner=owner))
        begun = noise(problem, *problem.image_shape)
        if self.quasi_newton:
            begun = problem.target_model.normalise(0.5 + _SPREAD * begun)
        search = PixelSearch(problem, begun, hard_labels(problem))
        unknowns = problem.unknowns()
        variables = search.variables | unknowns
        optimizer: BatchedOptimizer = (
            BatchedLBFGS(variables)
            if self.quasi_newton
            else FirstOrder(
                variables,
                FirstOrderSettings(
                    kind="adam",
                    lr=self.lr,
                    schedule="step",
                    signed=self.signed,
                    rates=dict.fromkeys(unknowns, 0.1),
                ),
                project=search.box,
            )
        )
        return minimise(
            problem,
            search,
            optimizer,
            run,
            objective=self.objective or WithPositions(alpha=self.alpha, position=position),
            priors=priors,
            unknowns=unknowns,
        )


def patch_of_each_pixel(projection: Projection, shape: tuple[int, int, int]) -> Tensor:
    """Return the number of the last patch that holds each pixel, int64 ``(H, W)``."""
    owner = torch.full((math.prod(shape) + 1,), -1)
    numbers = torch.arange(len(projection.pixels))[:, None].expand_as(projection.pixels)
    owner[projection.pixels.flatten() % len(owner)] = numbers.flatten()
    return owner[:-1].view(shape)[0]
