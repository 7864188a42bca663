"""Exact inputs of a whole batch where a linear layer with a ReLU behind it sees the images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.methods.spear.likely_images import common_scale, likely_images
from bract.attacks.methods.spear.low_rank import Subspace, factors
from bract.attacks.methods.spear.noisy_factors import Layer, NoisyFactors
from bract.attacks.methods.spear.noisy_search import NoisySearch
from bract.attacks.methods.spear.sparse_directions import SparseSearch
from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import (
    BatchGradient,
    DefendedForward,
    LocalTraining,
    images_in,
)
from bract.attacks.problem.exact import require_exact, require_one_gradient
from bract.attacks.problem.linear_layers import FirstLayer, first_layer
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.training_path import TrainingPath
from bract.attacks.reading.entered import Determined, Entered
from bract.attacks.reading.site import Site
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.regularizers import NaturalImages
from bract.errors import BractError
from bract.protocol.update import Tensors

_FULL_RANK = 1e-2
_UNBOUNDED = 1 << 31

_ROUNDING = 3.0
"""Rounding of an update of several steps, in that outside its rank: what a step rounds is not as
white as the rest."""

_UNEXPLAINED = 3.0
"""Squared error over the noise's above which nothing is returned."""

_MOST_BLURRED = 32
"""Most images that are separated under noise or over several steps: a round's cost grows with the
cube of their number, and no larger batch was measured."""

_PATIENCE, _LONGER = 40, 150
"""Rounds without a better set of factors after which a search ends, under noise and over steps."""


@ATTACKS.register("spear")
@dataclass(frozen=True, kw_only=True)
class Spear(Attack):
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
        units, features = case.evidence.target[layer.weight].shape
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
        _subspace(case, layer.site, images)
        return case.simulating(unroll=self.unroll, max_images=images)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Factor every trial's gradient."""
        exact = problem.to(torch.float64)
        images = torch.full(
            (problem.trials, *problem.image_shape), 0.5, device=problem.device, dtype=exact.dtype
        )
        labels = torch.zeros(
            (problem.trials, problem.image_shape[0], problem.classes),
            device=problem.device,
            dtype=exact.dtype,
        )
        recipes, rounds = [], []
        for trial, generator in enumerate(problem.generators()):
            case = problem.cases[trial]
            layer = first_layer(case.target_model, case.observation)
            if _blurred(case):
                blurred, found, labelled = _under_noise(exact, trial, layer, generator, run)
                (classes, shares), rounds_done = labelled, blurred.rounds_done
                recipe = _blurred_recipe(layer, case, blurred)
            else:
                search = searched(case, layer.site, generator, run, trial, problem.trials)
                read, rounds_done = separated(search, layer.site), search.rounds_done
                assert read.values is not None and read.slopes is not None
                found = _images(problem, layer, read.values)
                classes, shares = _labels(exact, trial, layer, found, read.slopes)
                recipe = None
            order = repeated(shares, problem.image_shape[0])
            images[trial, : len(order)] = found[order].to(images)
            labels[trial, : len(order)] = classes[order].to(labels)
            labels[trial, len(order) :] = 1.0 / problem.classes
            recipes.append(recipe or _recipe(layer, len(order), problem.image_shape[0]))
            rounds.append(rounds_done)
        problem.target_model.model.to(problem.device)
        simulated = exact.simulate(images.clamp(0.0, 1.0), labels, exact.unknowns())
        return Outcome(
            images=images,
            labels=labels,
            losses=_losses(exact, images.clamp(0.0, 1.0), simulated),
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


def _subspace(case: Case, site: Site, images: int) -> Subspace:
    """Decompose the gradient of weight and bias side by side."""
    joint = site.rows(case.evidence.target)
    key, deviation = case.observation.key, case.evidence.deviation
    if deviation is not None:
        space = Subspace.under(joint, images, deviation)
        if not space.rank:
            raise BractError(
                f"{key}: noise of deviation {deviation:.3g} drowns every singular value of the "
                f"gradient of {site.weight}",
                code="attack-evidence",
            )
        return space
    space = Subspace.of(joint, images)
    left = float(space.rest / joint.norm().clamp_min(1e-300))
    if left > _FULL_RANK or not space.rank:
        raise BractError(
            f"{key}: {left:.1%} of the gradient of {site.weight} are outside the "
            f"rank that {images} images make (at most {_FULL_RANK:.0%} of rounding is expected): "
            "noise, a defense, another optimizer, or more images than declared",
            code="attack-evidence",
        )
    if not case.law.one_step:
        return Subspace.under(joint, space.rank, _ROUNDING * space.deviation)
    return space


def _under_noise(
    problem: Problem, trial: int, layer: FirstLayer, generator: torch.Generator, run: Run
) -> tuple[NoisySearch, Tensor, tuple[Tensor, Tensor]]:
    """Return the search, images ``(N, C, H, W)`` and labels with shares, under noise or steps.

    Raises
    ------
    BractError
        If no factors were found that leave about the noise.
    """
    case, share = problem.cases[trial], 1.0 / problem.trials
    begun, better, least = time.perf_counter(), 0, float("inf")

    def over() -> bool:
        return run.seconds is not None and time.perf_counter() - begun >= run.seconds * share

    search = _noisy_search(problem, case, layer, generator, over)
    patience = _PATIENCE if case.evidence.deviation is not None else _LONGER
    for good in search.rounds():
        run.advance((trial + good / search.space.rank) * share, 1.0 - good / search.space.rank)
        if search.best is not None and search.best.cost < least:
            better, least = search.rounds_done, search.best.cost
        if search.rounds_done - better > patience:
            break
        if run.iterations is not None and search.rounds_done >= run.iterations:
            break
        if over():
            break
    best = search.best
    if best is None or not best.misfit < _UNEXPLAINED:
        left = "none" if best is None else f"{best.misfit:.3g} times the noise's"
        raise BractError(
            f"{case.observation.key}: no {search.space.rank} examples found that explain the "
            f"gradient of {layer.weight} in {search.rounds_done} iterations (squared error: {left})"
            "; raise the budget, or noise or local steps leave too few zeros",
            code="budget-spent",
        )
    inputs, rows = _scaled(search, best)
    found = _images(problem, layer, inputs)
    labelled = _labels(problem, trial, layer, found, rows)
    deviation = case.evidence.deviation
    if deviation is None or problem.target_model.loss.values or layer.matrix is not None:
        return search, found, labelled
    if case.law.one_step:
        factor = common_scale(labelled[1], rows, deviation)[:, None]
        inputs, rows = inputs / factor, rows * factor
        found = _images(problem, layer, inputs)
    _, height, width = found.shape[1:]
    if height == width and height > 1:
        found = likely_images(problem, rows, search.space.rows[:, :-1], deviation, found)
    return search, found, _labels(problem, trial, layer, found, rows)


def _noisy_search(
    problem: Problem,
    case: Case,
    layer: FirstLayer,
    generator: torch.Generator,
    stop: Callable[[], bool],
) -> NoisySearch:
    """Set the search up at the weights half-way through the client's training."""
    parameters, several = case.observation.parameters, not case.law.one_step
    forward = layer.site.rows(parameters)
    if several and not case.observation.declaration.defenses:
        forward = forward - 0.5 * layer.site.rows(case.observation.update)
    space = _subspace(case, layer.site, case.images)
    low, high = (
        problem.target_model.normalise(torch.full((1, *problem.image_shape[1:]), end)).flatten()
        for end in (0.0, 1.0)
    )
    if layer.matrix is not None:
        up, down = layer.matrix.clamp_min(0.0), layer.matrix.clamp_max(0.0)
        low, high = low.double(), high.double()
        low, high = (
            layer.offset + up @ low + down @ high,
            layer.offset + up @ high + down @ low,
        )
    return NoisySearch(
        space,
        Layer(
            outputs=forward @ space.right.T,
            length=float(forward.square().sum(dim=1).mean().sqrt()),
            low=low.cpu().double(),
            high=high.cpu().double(),
            switching=several,
        ),
        generator,
        stop=stop,
    )


def _scaled(search: NoisySearch, best: NoisyFactors) -> tuple[Tensor, Tensor]:
    """Return what entered the layer ``(N, n - 1)`` and L ``(N, m)`` at the scale of the bias."""
    entering = best.inputs @ search.space.right
    return entering[:, :-1] / entering[:, -1:], best.rows * entering[:, -1:]


def _losses(problem: Problem, images: Tensor, simulated: Tensors) -> Tensor:
    """Relative errors ``(L,)``; under noise minus the logarithm of the posterior, in nats."""
    if problem.likelihood is None:
        return problem.distance(RelativeError(), simulated).detach()
    nats = problem.distance(problem.likelihood, simulated) + NaturalImages()(problem, images)
    return nats.detach()


def _blurred_recipe(layer: FirstLayer, case: Case, search: NoisySearch) -> Recipe:
    assert search.best is not None
    parts = ["closed form", "sparse factors" if case.law.one_step else "sparse factors of a sum"]
    noise = "noise" if case.evidence.deviation is not None else "rounding"
    parts.append(f"squared error {search.best.misfit:.2f} times the {noise}'s")
    if not search.done:
        parts.append(f"unfinished: {search.sure} of {search.space.rank} rows agree with the layer")
    if case.target_model.loss.values and _shortened(case):
        parts.append("targets but for the clip")
    if layer.mixes:
        parts.append("least-norm image of a fixed map")
    if search.space.rank < case.images:
        parts.append(f"{search.space.rank} of {case.images} images above the noise")
    return Recipe("", (*parts, "labels from the first layer"))


def searched(
    case: Case, site: Site, generator: torch.Generator, run: Run, trial: int = 0, trials: int = 1
) -> SparseSearch:
    """Return the rows of L of a layer behind which a ReLU is, all of them.

    Raises
    ------
    BractError
        If the gradient has another rank, or the budget ends before every row is found.
    """
    space = _subspace(case, site, case.images)
    search = SparseSearch(space, site.rows(case.observation.parameters), generator)
    begun, share = time.perf_counter(), 1.0 / trials
    for found in search.rounds():
        run.advance((trial + found / space.rank) * share, 1.0 - found / space.rank)
        spent = time.perf_counter() - begun
        if run.iterations is not None and search.rounds_done >= run.iterations:
            break
        if run.seconds is not None and spent >= run.seconds * share:
            break
    if not search.done:
        raise BractError(
            f"{case.observation.key}: {len(search.found)} of {space.rank} examples found in "
            f"{search.rounds_done} iterations; raise the budget, or the batch is too large for a "
            f"layer of {len(space.live)} units",
            code="budget-spent",
        )
    return search


def separated(search: SparseSearch, site: Site) -> Entered:
    """Return what entered a layer, and the slopes of what left it, of a search that is done."""
    space = search.space
    values, rows = factors(space, search.found)
    slopes = rows.new_zeros(len(rows), len(space.live))
    slopes[:, space.live] = rows
    left = float(space.rest / space.rows.norm().clamp_min(1e-300))
    return Entered(
        site=site,
        values=values,
        slopes=slopes,
        certificate=Determined(values.numel(), left, _FULL_RANK),
        component="sparse factors",
    )


def _images(problem: Problem, layer: FirstLayer, inputs: Tensor) -> Tensor:
    _, *shape = problem.image_shape
    channels, height, width = shape
    pixels = layer.images(inputs, (channels, height, width)).to(problem.device)
    return problem.target_model.denormalise(pixels)


def _labels(
    problem: Problem, trial: int, layer: FirstLayer, images: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one-hot labels ``(N, classes)`` and the length of each row as a multiple of its own.

    The gradient of one example's loss with respect to the layer's bias is its row of L. Where the
    model predicts a number, its length determines the target.
    """
    classes, model = problem.classes, problem.target_model
    if model.loss.values:
        return _targets(problem, trial, layer, images, rows)
    chosen, shares = [], []
    for image, row in zip(images, rows, strict=True):
        inputs = model.normalise(image).expand(classes, 1, *image.shape).to(problem.dtype)
        state = {n: v[trial].expand(classes, *v.shape[1:]) for n, v in problem.parameters.items()}
        buffers = {n: v[trial].expand(classes, *v.shape[1:]) for n, v in problem.buffers.items()}
        bias = state[layer.bias].clone().requires_grad_()
        logits = model(state | {layer.bias: bias}, buffers, inputs)[:, 0]
        loss = model.loss.each(logits[:, None], torch.eye(classes).to(logits)[:, None]).sum()
        (gradient,) = torch.autograd.grad(loss, bias)
        best, share = nearest_class(gradient.detach().cpu(), row)
        chosen.append(best)
        shares.append(share)
    labels = torch.nn.functional.one_hot(torch.tensor(chosen), classes)
    return labels, torch.tensor(shares, dtype=torch.float64)


def nearest_class(alone: Tensor, slope: Tensor) -> tuple[int, float]:
    """Return the class whose slopes ``(classes, outputs)`` point as a slope does, and its share.

    The share is the length of the slope along that class', in the class' own length.
    """
    lengths = alone.norm(dim=1).clamp_min(1e-300)
    best = int((alone @ slope / lengths).argmax())
    return best, float(alone[best] @ slope / lengths[best] ** 2)


def _targets(
    problem: Problem, trial: int, layer: FirstLayer, images: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return targets ``(N, 1)`` at which the loss has the slope of each row, and ones.

    With ``dz`` the gradient of the output with respect to the layer's bias, a row is ``s dz``.
    """
    model, loss = problem.target_model, problem.target_model.loss
    if loss.label is None:
        raise BractError(
            f"{problem.cases[trial].observation.key}: the slope of the declared loss does not "
            "determine a target",
            code="attack-unsolved",
        )
    found = []
    for image, row in zip(images, rows, strict=True):
        inputs = model.normalise(image)[None, None].to(problem.dtype)
        state = {n: v[trial][None] for n, v in problem.parameters.items()}
        buffers = {n: v[trial][None] for n, v in problem.buffers.items()}
        bias = state[layer.bias].clone().requires_grad_()
        output = model(state | {layer.bias: bias}, buffers, inputs).sum()
        (gradient,) = torch.autograd.grad(output, bias)
        alone = gradient[0].detach().cpu()
        # A row is a share of the batch's mean.
        slope = (alone @ row) / alone.square().sum().clamp_min(1e-300) * problem.image_shape[0]
        found.append(loss.label(output.detach().cpu(), slope))
    return torch.stack(found)[:, None], torch.ones(len(found), dtype=torch.float64)


def repeated(shares: Tensor, images: int) -> list[int]:
    """Indices of the images, each as often as its share implies, where that accounts for all."""
    times = (shares / shares.median().clamp_min(1e-300)).round().clamp(1, images + 1)
    times = times.nan_to_num(1.0).to(torch.int64)
    if int(times.sum()) != images:
        return list(range(len(shares)))
    return torch.arange(len(shares)).repeat_interleave(times).tolist()


def _recipe(layer: FirstLayer, found: int, images: int) -> Recipe:
    parts = ["closed form", "sparse factors"]
    if layer.mixes:
        parts.append("least-norm image of a fixed map")
    if found < images:
        parts.append(f"{found} of {images} images above rounding")
    return Recipe("", (*parts, "labels from the first layer"))
