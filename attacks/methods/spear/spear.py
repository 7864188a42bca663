"""Exact inputs of a whole batch where a linear layer with a ReLU behind it sees the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Batches, Cost
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.spear.factor_reading import (
    Factors,
    read_blurred,
    read_sparse,
    subspace_of,
)
from bract.attacks.methods.spear.likely_images import common_scale, likely_images
from bract.attacks.methods.spear.slope_labels import labels_of, repeated
from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import (
    BatchGradient,
    DefendedForward,
    LocalTraining,
    images_in,
)
from bract.attacks.problem.linear_layers import FirstLayer, first_layer
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.training_path import TrainingPath
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import require_exact, require_one_gradient
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.regularizers import NaturalImages
from bract.errors import BractError

_UNBOUNDED = 1 << 31

_MOST_BLURRED = 32
"""Most images that are separated under noise or over several steps: a round's cost grows with the
cube of their number, and no larger batch was measured."""


@ATTACKS.register("spear")
@dataclass(frozen=True, kw_only=True)
class Spear(InvertingAttack):
    """Factor the first layer's gradient into one sparse row and one image an example.

    The gradient of the weight of a linear layer is ``L^T X``, of rank B for B examples; behind a
    ReLU the rows of L are sparse, and only the true ones are (SPEAR, Dimitrov et al. 2024). They
    are found by sparse descent with restarts instead of SPEAR's sampling of rows, whose cost
    doubles with every example (`SparseSearch`); dictionary learning in
    its place is the step of SPEAR++ (Bakarsky et al. 2025). The bias' gradient fixes the scales.
    Each image's label is the class whose gradient at the layer has the direction of the image's
    row of L.

    Under noise of a known deviation (`Evidence.likelihood`), and after several local steps of SGD,
    in which units switch, zeros are blurred: there `NoisySearch` fits all rows together. Noise
    keeps as many images as singular values exceed its edge, 32 at most; they are the likeliest
    ones for the rows found. What is returned is not certain then: the recipe has the error in that
    of the noise. Over several steps all images of the client are looked for, in one sum.

    All images of the update are looked for, whatever ``Budget.max_images``: fewer do not factor.
    Examples whose share of the gradient drowns in its rounding stay grey. An iteration is 64
    starts. An attack that has not found every row when its budget ends refuses.
    """

    name: ClassVar[str] = "spear"
    title: ClassVar[str] = "SPEAR"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "any"
    inputs: ClassVar[tuple[str, ...]] = ("image", "table", "signal")
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 200
    drawn: ClassVar[bool] = True

    def require_model(self, case: Case) -> None:
        """Refuse models that do not begin with a linear layer and a ReLU."""
        super().require_model(case)
        first_layer(case.target_model, case.observation)

    def prepare(self, case: Case) -> Case:
        """Refuse what does not factor: other models, other optimizers, other defenses."""
        images = images_in(case.observation.declaration, _UNBOUNDED)
        key = case.observation.key
        blurred = _blurred(case)
        if blurred:
            _require_sum(case.simulating(unroll=self.unroll), self.name)
        else:
            require_one_gradient(case.simulating(unroll=self.unroll), self.name)
        layer = first_layer(case.target_model, case.observation)
        require_exact(case, layer.site.names, self.name, under_noise=True)
        units, features = case.evidence.target[layer.site.weight].shape
        if images >= min(units, features):
            raise BractError(
                f"{key}: {images} images through a layer of {units} units and {features} inputs; "
                "spear needs fewer images than either",
                code="attack-unsuited",
            )
        if blurred and images > _MOST_BLURRED:
            raise BractError(
                f"{key}: {images} images in one update; under noise or over several steps spear "
                f"separates at most {_MOST_BLURRED}",
                code="attack-unsuited",
            )
        case = case.simulating(unroll=self.unroll, max_images=images)
        subspace_of(case, layer.site)
        return case

    def entered(self, case: Case, budget: ReadingBudget) -> Factors:
        """Factor the first layer's gradient."""
        layer = first_layer(case.target_model, case.observation)
        if _blurred(case):
            return read_blurred(case, layer, budget)
        return read_sparse(case, layer.site, budget)

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Return the images of least norm that enter as was read, and their labels."""
        del run
        exact = problem.to(torch.float64)
        images = torch.full(
            (problem.trials, *problem.image_shape), 0.5, device=problem.device, dtype=exact.dtype
        )
        labels = torch.full(
            (problem.trials, problem.image_shape[0], problem.classes),
            1.0 / problem.classes,
            device=problem.device,
            dtype=exact.dtype,
        )
        recipes, rounds = [], []
        for trial, (case, factors) in enumerate(zip(problem.cases, read, strict=True)):
            assert isinstance(factors, Factors)
            layer = first_layer(case.target_model, case.observation)
            found, classes, shares = _examples(exact, trial, layer, factors)
            order = repeated(shares, problem.image_shape[0])
            images[trial, : len(order)] = found[order].to(images)
            labels[trial, : len(order)] = classes[order].to(labels)
            recipes.append(_recipe(layer, case, factors, len(order)))
            rounds.append(factors.rounds)
        problem.target_model.model.to(problem.device)
        return Outcome(
            images=images,
            labels=labels,
            losses=_losses(exact, images.clamp(0.0, 1.0), labels),
            iterations=max(rounds),
            recipes=recipes,
        )


def _blurred(case: Case) -> bool:
    """Return whether noise or several steps blur the zeros of L."""
    return not case.law.one_step or case.evidence.deviation is not None


def _shortened(case: Case) -> bool:
    """Return whether a defense changed the update's length, and nothing else but noise."""
    return isinstance(case.forward, DefendedForward) and case.forward.only_shortens


def _require_sum(case: Case, attack: str) -> None:
    """Refuse what is no sum of gradients of the client's images, clipped and noisy at most."""
    law, forward = case.law, case.forward
    key = case.observation.key
    if law.averaging and (law.optimizer != "sgd" or not law.scaled):
        raise BractError(
            f"{key}: {attack} needs the gradient of a batch or declared steps of SGD, whose update "
            f"sums gradients; found {law.steps} steps of {law.optimizer}",
            code="attack-unsuited",
        )
    if _shortened(case):
        assert isinstance(forward, DefendedForward)
        forward = forward.client
    if not isinstance(forward, BatchGradient | LocalTraining | TrainingPath):
        raise BractError(
            f"{key}: the defense changes the gradient by more than its length before the noise; "
            f"{attack} factors the gradient itself",
            code="attack-unsuited",
        )


def _examples(
    problem: Problem, trial: int, layer: FirstLayer, read: Factors
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images ``(N, C, H, W)``, their labels, and their shares of the update.

    Under noise they are the likeliest images for the slopes that were read.
    """
    inputs, slopes = read.values, read.slopes
    assert inputs is not None and slopes is not None
    found = _images(problem, layer, inputs)
    labelled = labels_of(problem, trial, layer, found, slopes)
    case = problem.cases[trial]
    deviation, values = case.evidence.deviation, problem.target_model.loss.values
    if read.agreeing is None or deviation is None or values or layer.matrix is not None:
        return found, *labelled
    if case.law.one_step:
        factor = common_scale(labelled[1], slopes, deviation)[:, None]
        inputs, slopes = inputs / factor, slopes * factor
        found = _images(problem, layer, inputs)
    _, height, width = found.shape[1:]
    if height == width and height > 1:
        gradient = layer.site.rows(case.evidence.target)[:, :-1]
        found = likely_images(problem, slopes, gradient, deviation, found)
    return found, *labels_of(problem, trial, layer, found, slopes)


def _losses(problem: Problem, images: Tensor, labels: Tensor) -> Tensor:
    """Relative errors ``(L,)``; under noise minus the logarithm of the posterior, in nats."""
    if problem.likelihood is None:
        return problem.residuals(images, labels)
    simulated = problem.simulate(images, labels, problem.unknowns())
    nats = problem.distance(problem.likelihood, simulated) + NaturalImages()(problem, images)
    return nats.detach()


def _images(problem: Problem, layer: FirstLayer, inputs: Tensor) -> Tensor:
    _, *shape = problem.image_shape
    channels, height, width = shape
    pixels = layer.images(inputs, (channels, height, width)).to(problem.device)
    return problem.target_model.denormalise(pixels)


def _recipe(layer: FirstLayer, case: Case, read: Factors, placed: int) -> Recipe:
    """Return the parts of the method, of which ``placed`` images have a place."""
    parts = ["closed form", read.component]
    assert read.values is not None
    rank = len(read.values)
    if read.agreeing is not None:
        noise = "noise" if case.evidence.deviation is not None else "rounding"
        parts.append(f"squared error {read.certificate.residual:.2f} times the {noise}'s")
        if not read.certificate.sure:
            parts.append(f"unfinished: {read.agreeing} of {rank} rows agree with the layer")
        if case.target_model.loss.values and _shortened(case):
            parts.append("targets but for the clip")
    if layer.mixes:
        parts.append("least-norm image of a fixed map")
    shown, limit = (placed, "rounding") if read.agreeing is None else (rank, "the noise")
    if shown < case.images:
        parts.append(f"{shown} of {case.images} images above {limit}")
    return Recipe("", (*parts, "labels from the first layer"))
