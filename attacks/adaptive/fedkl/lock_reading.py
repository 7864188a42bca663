"""Read gamma and beta of a locked layer in closed form, from the loss down to the image.

From the gradient of one image the input of a linear layer follows exactly: it is an outer product.
Below a convolution with normalisation everything but one scale and one mean a channel is known, and
its forward pass and its weight gradient are linear equations in its input, more than enough of
them. So the activations of every layer follow one after another by least squares, down to what the
locked layer put out. Its mean and deviation over the image are beta and gamma; the image, solved
for in the same way, determines the signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from bract.attacks.adaptive.fedkl.convolution_system import (
    ConvolutionSystem,
    Solution,
    centred,
)
from bract.attacks.problem.batched_network import Tracer
from bract.attacks.problem.client_model import loss_gradient
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.solve.regularizers import known_statistics
from bract.captures.observation import Observation
from bract.models.keylock import LockedBatchNorm2d
from bract.updates.update import Tensors

MOST = 4096
"""Most inputs of a layer that are solved for; memory grows with their square."""

EXPLAINED = 1e-3
"""Largest relative residual of the update, simulated with what was read, that is taken for it."""

BLACK = 1e-2
"""Share of the largest pixel below which one counts as zero: what is black is read with noise, and
where black is the number zero no contrast would be left to a pixel just below it."""

_TOPS, _GRID, _SECTIONS = (-1.0, 8.0), 18, 20
"""Where the largest input of the sigmoid behind the lock is looked for, and in how many steps."""


Sign = Literal["batch statistics", "the ReLU", "contrast"]


@dataclass(frozen=True)
class Reading:
    """Gamma and beta ``(channels,)`` of the locked layer, by name, and the residual they leave.

    ``sign`` names what the sign of gamma and the image was taken from.
    """

    coefficients: Tensors
    residual: float
    sign: Sign


def read_lock(
    observation: Observation, target_model: TargetModel, *, relu: bool = False
) -> Reading | None:
    """Return gamma and beta of the first layer's lock, or None where they cannot be read so.

    That takes the gradient of one image; a chain of convolutions, sigmoids and linear layers with a
    bias, without pooling or branches; batch statistics; and a lock on the first convolution only.
    The normalisation hides the image's contrast, and whether it is a negative, with every gamma of
    the other sign. Returned statistics of the batch determine both, and under a ReLU gamma is
    positive. Elsewhere the sign is taken that allows more contrast between black and white, which
    is a guess: an image that stays darker than what the model counts as zero is reconstructed as
    its negative, with the same update.

    Of eight training digits of 32x32 through four fresh strided LeNets with normalisation all eight
    locks were read to 1.2e-4; behind a ReLU the six of them with more than three live channels of
    twelve were, and the two with three are left to the search. A reading takes six CPU seconds.
    """
    chain = _chain(target_model)
    if chain is None:
        return None
    state = {n: v.double() for n, v in observation.parameters.items()}
    wanted = {n: v.double() for n, v in observation.gradient().items()}
    try:
        found = _descend_chain(chain, state, wanted)
        if found is None:
            return None
        layer, gamma, beta, image = found
        factor, sign = _factor(observation, target_model, chain, image, gamma if relu else None)
        turned = gamma if factor > 0 else -gamma
        coefficients = {f"{layer}.gamma": turned.float(), f"{layer}.beta": beta.float()}
        last = f"{chain[-1].name}.bias"
        residual = _residual(observation, target_model, coefficients, factor * image, last)
    except RuntimeError:  # as `torch.linalg` raises it on numbers that fit no lock
        return None
    return Reading(coefficients, residual, sign) if residual <= EXPLAINED else None


@dataclass(frozen=True)
class _Stage:
    """A layer of the chain, and the shape ``(C, H, W)`` of what enters it."""

    name: str
    layer: nn.Module
    shape: tuple[int, ...]


def _chain(target_model: TargetModel) -> list[_Stage] | None:
    model, shape = target_model.model, target_model.image_shape
    if not model.training:
        return None
    try:
        nodes = list(Tracer().trace(model).nodes)
    except (fx.proxy.TraceError, TypeError, ValueError, AttributeError, RuntimeError):
        return None
    modules, stages, before = dict(model.named_modules()), [], nodes[0]
    side = torch.zeros(2, *shape)
    for node in nodes[1:-1]:
        flat = node.target is torch.flatten and node.args[1:] == (1,)
        layer = nn.Flatten() if flat else modules.get(str(node.target))
        if node.args[0] is not before or layer is None:
            return None
        if type(layer) not in (nn.Conv2d, nn.Sigmoid, nn.Linear, nn.Flatten) and not isinstance(
            layer, nn.BatchNorm2d
        ):
            return None
        stages.append(_Stage(str(node.target), layer, tuple(side.shape[1:])))
        if not isinstance(layer, nn.BatchNorm2d):
            with torch.no_grad():
                side = layer(side.to(next(model.parameters())))
        before = node
    return stages if stages and _fits(stages) else None


def _fits(stages: list[_Stage]) -> bool:
    locks = [i for i, s in enumerate(stages) if isinstance(s.layer, LockedBatchNorm2d)]
    if locks != [1] or not isinstance(stages[0].layer, nn.Conv2d):
        return False
    for index, stage in enumerate(stages):
        layer, after = stage.layer, stages[index + 1].layer if stage is not stages[-1] else None
        if isinstance(layer, nn.Linear):
            fits = layer.bias is not None and (after is None or isinstance(after, nn.Sigmoid))
        elif isinstance(layer, nn.Conv2d):
            fits = (
                isinstance(after, nn.BatchNorm2d)
                and layer.groups == 1
                and layer.padding_mode == "zeros"
                and not isinstance(layer.padding, str)
                and math.prod(stage.shape) <= MOST
            )
        elif isinstance(layer, nn.BatchNorm2d):
            fits = isinstance(after, nn.Sigmoid)
        elif isinstance(layer, nn.Flatten):
            fits = (layer.start_dim, layer.end_dim) == (1, -1)
        else:
            fits = after is not None
        if not fits:
            return False
    return isinstance(stages[-1].layer, nn.Linear)


def _descend_chain(
    stages: list[_Stage], state: Tensors, wanted: Tensors
) -> tuple[str, Tensor, Tensor, Tensor] | None:
    """Walk from the logits to the image with each value and the loss's gradient by it."""
    value = slope = wanted[f"{stages[-1].name}.bias"]
    for index in range(len(stages) - 1, 1, -1):
        name, layer, shape = stages[index].name, stages[index].layer, stages[index].shape
        if isinstance(layer, nn.Linear):
            # Of a hidden layer ``slope`` is known twice: as the gradient of its bias, too.
            value = slope @ wanted[f"{name}.weight"] / slope.square().sum()
            slope = slope @ state[f"{name}.weight"]
        elif isinstance(layer, nn.Flatten):
            value, slope = value.view(shape), slope.view(shape)
        elif isinstance(layer, nn.Sigmoid):
            value, slope = value.logit(), slope * value * (1.0 - value)
        elif isinstance(layer, nn.BatchNorm2d):
            gamma = state[f"{name}.weight"]
            share = centred(value).square().mean((1, 2)) / gamma.square().clamp_min(1e-12)
            system = _system(stages[index - 1], state, wanted)
            solution = system.solve(value, slope, share.clamp(max=1.0))
            below = stages[index - 3]
            if not solution.alone or float(solution.values.min()) <= 0.0:
                return None
            # Only the factor is missing: the layer below puts out sigmoids of numbers whose mean is
            # its shift, or, of a lock, the factor with which the image fits.
            value, slope = solution.values, solution.slope
            if isinstance(below.layer, LockedBatchNorm2d):
                return _unlock(stages, state, wanted, value, slope)
            shift = state[f"{below.name}.bias"].mean()
            value, slope = _with_top(value, slope, _top_with_mean(value, float(shift)))
    return None


def _unlock(
    stages: list[_Stage], state: Tensors, wanted: Tensors, value: Tensor, slope: Tensor
) -> tuple[str, Tensor, Tensor, Tensor] | None:
    system = _system(stages[0], state, wanted)

    def solve(top: float) -> tuple[Solution, Tensor]:
        scaled, pulled = _with_top(value, slope, top)
        entering = scaled.logit()
        return system.solve(entering, pulled * scaled * (1.0 - scaled)), entering

    solution, entering = solve(_lowest(lambda top: solve(top)[0].misfit))
    if not solution.alone:
        return None
    gamma = entering.std((1, 2), correction=0) * solution.scales.sign()
    return stages[1].name, gamma, entering.mean((1, 2)), solution.values


def _system(stage: _Stage, state: Tensors, wanted: Tensors) -> ConvolutionSystem:
    name = f"{stage.name}.weight"
    assert isinstance(stage.layer, nn.Conv2d)
    return ConvolutionSystem(stage.layer, state[name], wanted[name], stage.shape)


def _with_top(value: Tensor, slope: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Multiply so that the largest value is ``sigmoid(top)``; a gradient by it is divided."""
    factor = 1.0 / (1.0 + math.exp(-top)) / float(value.max())
    return value * factor, slope / factor


def _top_with_mean(value: Tensor, mean: float) -> float:
    """Return the top at which the inputs of the sigmoid have this mean; it rises with the top."""
    low, high = -30.0, 30.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        found = float(_with_top(value, value, middle)[0].logit().mean())
        low, high = (middle, high) if found < mean else (low, middle)
    return 0.5 * (low + high)


def _lowest(misfit: Callable[[float], float]) -> float:
    """Return the top of least misfit: the lowest of a grid, then golden sections about it."""
    low, high = _TOPS
    step = (high - low) / _GRID
    best = min((low + i * step for i in range(_GRID + 1)), key=misfit)
    low, high = best - step, best + step
    ratio = 0.5 * (math.sqrt(5.0) - 1.0)
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    found = [misfit(at) for at in inner]
    for _ in range(_SECTIONS):
        if found[0] < found[1]:
            high = inner[1]
            inner = [high - ratio * (high - low), inner[0]]
            found = [misfit(inner[0]), found[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + ratio * (high - low)]
            found = [found[1], misfit(inner[1])]
    return 0.5 * (low + high)


def _factor(
    observation: Observation,
    target_model: TargetModel,
    chain: list[_Stage],
    image: Tensor,
    positive: Tensor | None,
) -> tuple[float, Sign]:
    """Return the factor of the image, its sign included, and what this was taken from.

    ``positive`` is a gamma that has to be positive.
    """
    known, own = known_statistics(observation, target_model)
    if own and chain[1].name in known:
        # What enters the normalisation is linear in the image, but for the convolution's bias.
        first = chain[0]
        assert isinstance(first.layer, nn.Conv2d)
        state = {n: v.double() for n, v in observation.parameters.items()}
        mean, variance = (part.double() for part in known[chain[1].name])
        bias = state.get(f"{first.name}.bias", torch.zeros_like(mean))
        weight = state[f"{first.name}.weight"]
        layer = first.layer
        found = F.conv2d(
            image[None], weight, None, layer.stride, layer.padding, layer.dilation
        ).mean((0, 2, 3))
        trust = 1.0 / variance.clamp_min(1e-12)
        along = float((trust * found * (mean - bias)).sum() / (trust * found.square()).sum())
        return along, "batch statistics"

    low, high = (
        target_model.normalise(torch.full_like(image, end).float()).double() for end in (0.0, 1.0)
    )
    seen = image.abs() > BLACK * image.abs().max()

    def contrast(sign: float) -> float:
        """Largest factor with which the image stays between black and white."""
        at = sign * image
        limits = torch.where(at > 0, high / at, low / at)
        return float(limits[seen].min())

    if positive is not None:
        sign = 1.0 if float(positive.sum()) >= 0 else -1.0
    else:
        sign = max((1.0, -1.0), key=contrast)
    return sign * max(contrast(sign), 1e-3), "contrast" if positive is None else "the ReLU"


def _residual(
    observation: Observation,
    target_model: TargetModel,
    coefficients: Tensors,
    image: Tensor,
    last: str,
) -> float:
    """Return what simulation leaves of the update, relatively."""
    names = target_model.parameter_names
    wanted = {n: v.double() for n, v in observation.gradient().items() if n in names}
    label = F.one_hot(wanted[last].argmin(), target_model.classes).double()
    found = loss_gradient(
        target_model,
        {n: observation.parameters[n].double()[None] for n in names},
        {n: v.double()[None] for n, v in coefficients.items()},
        image[None, None],
        label[None, None],
    )
    left = sum(float((found[n][0] - v).square().sum()) for n, v in wanted.items())
    whole = sum(float(v.square().sum()) for v in wanted.values())
    return math.sqrt(left / whole)
