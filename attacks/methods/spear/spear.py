"""Exact inputs of a whole batch where a linear layer with a ReLU behind it sees the images."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.methods.spear.low_rank import Subspace, factors
from bract.attacks.methods.spear.sparse_directions import SparseSearch
from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.exact import require_exact, require_one_gradient
from bract.attacks.problem.linear_layers import FirstLayer, first_layer
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.errors import BractError

_FULL_RANK = 1e-2
_UNBOUNDED = 1 << 31


@ATTACKS.register("spear")
@dataclass(frozen=True, kw_only=True)
class Spear(Attack):
    """Factor the first layer's gradient into one sparse row and one image an example.

    The gradient of the weight of a linear layer is ``L^T X``, of rank B for B examples; behind a
    ReLU the rows of L are sparse, and only the true ones are (SPEAR, Dimitrov et al. 2024). They
    are found by sparse descent with restarts instead of SPEAR's sampling of rows, whose cost
    doubles with every example (`SparseSearch`); dictionary learning in
    its place is the step of SPEAR++ (2025). The bias' gradient fixes the scales. Each image's
    label is the class whose gradient at the layer has the direction of the image's row of L.

    All images of the update are looked for, whatever ``Budget.max_images``: fewer do not factor.
    Examples whose share of the gradient drowns in its rounding stay grey. An iteration is 64
    starts. An attack that has not found every row when its budget ends refuses.
    """

    name: ClassVar[str] = "spear"
    title: ClassVar[str] = "SPEAR"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "any"
    inputs: ClassVar[tuple[str, ...]] = ("image", "table")
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 200

    def require_model(self, case: Case) -> None:
        """Refuse models that do not begin with a linear layer and a ReLU."""
        super().require_model(case)
        first_layer(case.target_model, case.observation)

    def prepare(self, case: Case) -> Case:
        """Refuse what does not factor: other models, several steps, defended gradients."""
        images = images_in(case.observation.declaration, _UNBOUNDED)
        key = case.observation.key
        require_one_gradient(case.simulating(unroll=self.unroll), self.name)
        layer = first_layer(case.target_model, case.observation)
        require_exact(case, (layer.weight, layer.bias), self.name)
        units, features = case.evidence.target[layer.weight].shape
        if images >= min(units, features):
            raise BractError(
                f"{key}: {images} images through a layer of {units} units and {features} inputs; "
                "spear needs fewer images than either"
            )
        _subspace(case, layer, images)
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
            search = searched(case, layer, generator, run, trial, problem.trials)
            inputs, rows = factors(search.space, search.found)
            found = _images(problem, layer, inputs)
            classes, shares = _labels(exact, trial, layer, found, rows, search.space.live)
            order = repeated(shares, problem.image_shape[0])
            images[trial, : len(order)] = found[order].to(images)
            labels[trial, : len(order)] = classes[order].to(labels)
            labels[trial, len(order) :] = 1.0 / problem.classes
            recipes.append(_recipe(layer, len(order), problem.image_shape[0]))
            rounds.append(search.rounds_done)
        problem.target_model.model.to(problem.device)
        simulated = exact.simulate(images.clamp(0.0, 1.0), labels, exact.unknowns())
        return Outcome(
            images=images,
            labels=labels,
            losses=exact.distance(RelativeError(), simulated).detach(),
            iterations=max(rounds),
            recipes=recipes,
        )


def _subspace(case: Case, layer: FirstLayer, images: int) -> Subspace:
    """Decompose the gradient of weight and bias side by side."""
    target = case.evidence.target
    joint = torch.cat([target[layer.weight], target[layer.bias][:, None]], dim=1).cpu().double()
    space = Subspace.of(joint, images)
    left = float(space.rest / joint.norm().clamp_min(1e-300))
    if left > _FULL_RANK or not space.rank:
        raise BractError(
            f"{case.observation.key}: {left:.1%} of the gradient of {layer.weight} are outside the "
            f"rank that {images} images make (at most {_FULL_RANK:.0%} of rounding is expected): "
            "noise, a defense, another optimizer, or more images than declared"
        )
    return space


def searched(
    case: Case, layer: FirstLayer, generator: torch.Generator, run: Run, trial: int, trials: int
) -> SparseSearch:
    """Return the rows of L of a layer behind which a ReLU is, all of them.

    Raises
    ------
    BractError
        If the gradient has another rank, or the budget ends before every row is found.
    """
    parameters = case.observation.parameters
    forward = torch.cat([parameters[layer.weight], parameters[layer.bias][:, None]], dim=1)
    space = _subspace(case, layer, case.images)
    search = SparseSearch(space, forward.cpu().double(), generator)
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
            f"layer of {len(space.live)} units"
        )
    return search


def _images(problem: Problem, layer: FirstLayer, inputs: Tensor) -> Tensor:
    _, *shape = problem.image_shape
    channels, height, width = shape
    pixels = layer.images(inputs, (channels, height, width)).to(problem.device)
    return problem.target_model.denormalise(pixels)


def _labels(
    problem: Problem, trial: int, layer: FirstLayer, images: Tensor, rows: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one-hot labels ``(N, classes)`` and the length of each row as a multiple of its own.

    The gradient of one example's loss with respect to the layer's bias is its row of L. Where the
    model predicts a number, its length determines the target.
    """
    classes, model = problem.classes, problem.target_model
    if model.loss.values:
        return _targets(problem, trial, layer, images, rows, live)
    chosen, shares = [], []
    for image, row in zip(images, rows, strict=True):
        inputs = model.normalise(image).expand(classes, 1, *image.shape).to(problem.dtype)
        state = {n: v[trial].expand(classes, *v.shape[1:]) for n, v in problem.parameters.items()}
        buffers = {n: v[trial].expand(classes, *v.shape[1:]) for n, v in problem.buffers.items()}
        bias = state[layer.bias].clone().requires_grad_()
        logits = model(state | {layer.bias: bias}, buffers, inputs)[:, 0]
        loss = torch.nn.functional.cross_entropy(
            logits, torch.arange(classes, device=logits.device), reduction="sum"
        )
        (gradient,) = torch.autograd.grad(loss, bias)
        alone = gradient.detach()[:, live.to(gradient.device)].cpu()
        lengths = alone.norm(dim=1).clamp_min(1e-300)
        best = int(((alone @ row) / lengths).argmax())
        chosen.append(best)
        shares.append(float(alone[best] @ row / lengths[best] ** 2))
    labels = torch.nn.functional.one_hot(torch.tensor(chosen), classes)
    return labels, torch.tensor(shares, dtype=torch.float64)


def _targets(
    problem: Problem, trial: int, layer: FirstLayer, images: Tensor, rows: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Return targets ``(N, 1)`` at which the loss has the slope of each row, and ones.

    With ``dz`` the gradient of the output with respect to the layer's bias, a row is ``s dz``.
    """
    model, loss = problem.target_model, problem.target_model.loss
    if loss.label is None:
        raise BractError(
            f"{problem.cases[trial].observation.key}: the slope of the declared loss does not "
            "determine a target"
        )
    found = []
    for image, row in zip(images, rows, strict=True):
        inputs = model.normalise(image)[None, None].to(problem.dtype)
        state = {n: v[trial][None] for n, v in problem.parameters.items()}
        buffers = {n: v[trial][None] for n, v in problem.buffers.items()}
        bias = state[layer.bias].clone().requires_grad_()
        output = model(state | {layer.bias: bias}, buffers, inputs).sum()
        (gradient,) = torch.autograd.grad(output, bias)
        alone = gradient[0].detach().cpu()[live.cpu()]
        # A row is a share of the batch's mean.
        slope = (alone @ row) / alone.square().sum().clamp_min(1e-300) * problem.image_shape[0]
        found.append(loss.label(output.detach().cpu(), slope))
    return torch.stack(found)[:, None], torch.ones(len(found), dtype=torch.float64)


def repeated(shares: Tensor, images: int) -> list[int]:
    """Indices of the images, each as often as its share implies, where that accounts for all."""
    times = (shares / shares.median().clamp_min(1e-300)).round().to(torch.int64).clamp_min(1)
    order = torch.arange(len(shares)).repeat_interleave(times)
    return order.tolist() if len(order) == images else list(range(len(shares)))


def _recipe(layer: FirstLayer, found: int, images: int) -> Recipe:
    parts = ["closed form", "sparse factors"]
    if layer.mixes:
        parts.append("least-norm image of a fixed map")
    if found < images:
        parts.append(f"{found} of {images} images above rounding")
    return Recipe("", (*parts, "labels from the first layer"))
