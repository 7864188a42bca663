"""The patch projection of a model and the position embedding added to what leaves it, by probes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bract import tap
from bract.attacks.problem.linear_layers import entering
from bract.attacks.problem.target_model import TargetModel
from bract.errors import BractError
from bract.protocol.observation import Observation
from bract.protocol.update import Tensors

_NOISE = 0.02
"""Deviation of what is added to the parameters of the probe: an output layer of zeros, or blocks
that begin as the identity, would leave no gradient to compare."""

_EQUAL = 1e-3
"""Relative difference up to which two gradients of the probe, in float32, count as equal."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A layer that maps each patch of the image to a token.

    Attributes
    ----------
    name
        Name of the module, a convolution or a linear layer.
    weight, bias
        Names of its parameters; ``bias`` is None where it has none.
    pixels
        int64 ``(N, P)``: the place in the flattened image of each pixel of each of N patches, in
        the order of the weight's columns; -1 for padding.
    """

    name: str
    weight: str
    bias: str | None
    pixels: Tensor

    def patches(self, images: Tensor) -> Tensor:
        """Return the patches ``(..., N, P)`` of images ``(..., C, H, W)``; zeros for padding."""
        flat = F.pad(images.flatten(-3), (0, 1))
        found: Tensor = flat[..., self.pixels.to(images.device)]
        return found

    def images(self, patches: Tensor, shape: tuple[int, int, int], grey: float = 0.0) -> Tensor:
        """Return the images ``(..., C, H, W)`` of patches ``(..., N, P)``.

        Pixels of several patches are averaged; those of none, which a stride larger than the patch
        leaves, are ``grey``.
        """
        places = self.pixels.to(patches.device).flatten() % (math.prod(shape) + 1)
        flat = patches.flatten(-2)
        total = flat.new_zeros(*flat.shape[:-1], math.prod(shape) + 1)
        count = total.new_zeros(total.shape[-1])
        count.index_add_(0, places, torch.ones_like(places, dtype=count.dtype))
        total.index_add_(-1, places, flat)
        seen = (total / count.clamp_min(1.0)).where(count > 0, grey)
        return seen[..., :-1].view(*seen.shape[:-1], *shape)


@dataclass(frozen=True, kw_only=True)
class Position:
    """A learned parameter that is added to the tokens of the patches.

    Attributes
    ----------
    name
        Name of the parameter.
    places
        int64 ``(N, width)``: where the flattened parameter holds each patch's row.
    factor
        What the rows are multiplied by before they are added.
    """

    name: str
    places: Tensor
    factor: float

    def gradient(self, tensor: Tensor) -> Tensor:
        """Return the loss's gradient at the tokens ``(N, width)`` from that of the parameter."""
        return tensor.flatten()[self.places.to(tensor.device)] / self.factor


@dataclass(frozen=True, kw_only=True)
class PatchLayers:
    """The two parameters from whose gradients patches can be computed."""

    projection: Projection
    position: Position


def patch_layers(target_model: TargetModel, observation: Observation) -> PatchLayers:
    """Find the layer that sees patches of the image, and the learned parameter added behind it.

    Both are found on probes, not by name: the layer takes pixels of the image itself, and a
    parameter was added to what leaves it if the gradients of both are equal, row by row.

    Raises
    ------
    BractError
        If no layer takes patches of the image, or no learned parameter is added to its tokens.
    """
    projection = patch_projection(target_model, observation)
    return PatchLayers(
        projection=projection, position=_position(target_model, observation, projection)
    )


def patch_projection(target_model: TargetModel, observation: Observation) -> Projection:
    """Find the layer that sees patches of the image; see `patch_layers`."""
    shape = target_model.image_shape
    where = f"{observation.key}: model {target_model.declaration.model!r}"
    if math.prod(shape) >= 1 << 24:
        raise BractError(
            f"{where}: images of {shape} hold too many values to tell them apart",
            code="attack-unsuited",
        )
    # float32 holds each number of a pixel exactly.
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).view(1, *shape)
    seen = entering(target_model, observation, numbers, nn.Conv2d, nn.Linear)
    for name, module in target_model.model.named_modules():
        if name not in seen:
            continue
        pixels = _pixels_of(module, seen[name], numbers)
        if pixels is not None and len(pixels) > 1:
            prefix = f"{name}." if name else ""
            return Projection(
                name=name,
                weight=f"{prefix}weight",
                bias=None if module.bias is None else f"{prefix}bias",
                pixels=pixels,
            )
    raise BractError(
        f"{where} has no layer that maps patches of the image to tokens, as a vision transformer "
        "has",
        code="attack-unsuited",
    )


def _pixels_of(module: nn.Module, entered: Tensor, numbers: Tensor) -> Tensor | None:
    """Places of the pixels in each row that the layer multiplies, or None where they are none."""
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or isinstance(module.padding, str) or entered.dim() != 4:
            return None
        if module.padding_mode != "zeros" or not torch.equal(entered, numbers):
            return None
        rows = F.unfold(
            entered + 1.0, module.kernel_size, module.dilation, module.padding, module.stride
        )
        return rows[0].T.round().to(torch.int64) - 1
    if entered.dim() != 3 or len(entered) != 1:
        return None
    rows = entered[0].round().to(torch.int64)
    known = int(rows.min()) >= 0 and int(rows.max()) < numbers.numel()
    same = torch.equal(rows.to(entered), entered[0])
    return rows if known and same and len(rows.unique()) == numbers.numel() else None


def _position(
    target_model: TargetModel, observation: Observation, projection: Projection
) -> Position:
    where = f"{observation.key}: model {target_model.declaration.model!r}"
    tokens, gradients = _probe(target_model, observation, projection)
    for name, gradient in gradients.items():
        found = _rows_in(gradient, tokens)
        if found is not None:
            return Position(name=name, places=found[0], factor=found[1])
    raise BractError(
        f"{where} adds no learned parameter to the patches that leave {projection.name!r} (fixed "
        "positions, frozen ones, or none); their gradients are not in the update, so that the "
        "patches cannot be solved for; use april, which searches for them",
        code="attack-unsuited",
    )


def _rows_in(gradient: Tensor, tokens: Tensor) -> tuple[Tensor, float] | None:
    """Places ``(N, width)`` of the tokens' gradients in a parameter's, and their factor."""
    count, width = tokens.shape
    if gradient.numel() < count * width:
        return None
    for axis in [a for a, size in enumerate(gradient.shape) if size == width]:
        rows = gradient.movedim(axis, -1).reshape(-1, width)
        lengths = rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
        own = tokens.norm(dim=1, keepdim=True).clamp_min(1e-30)
        cosines = (tokens / own) @ (rows / lengths).T
        best = cosines.abs().argmax(dim=1)
        if len(best.unique()) != count:
            continue
        chosen = rows[best]
        factor = float((chosen * tokens).sum() / tokens.square().sum())
        if factor and float((chosen - factor * tokens).norm()) <= _EQUAL * float(chosen.norm()):
            numbered = torch.arange(gradient.numel()).view(gradient.shape)
            return numbered.movedim(axis, -1).reshape(-1, width)[best], factor
    return None


def _probe(
    target_model: TargetModel, observation: Observation, projection: Projection
) -> tuple[Tensor, Tensors]:
    """Gradients of one loss at the tokens ``(N, width)`` and at every parameter."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, *target_model.image_shape, generator=generator)
    state = target_model.captured(observation)
    learned = {}
    for name in target_model.parameter_names:
        value = state[name]
        added = _NOISE * torch.randn(value.shape, generator=generator)
        learned[name] = (value + added.to(value)).requires_grad_()
    left: list[Tensor] = []
    with tap.leaving(target_model.model, [projection.name], lambda _, made: left.append(made)):
        logits = functional_call(target_model.model, state | learned, (probe,))
    weights = torch.randn(logits.shape, generator=generator)
    if len(left) == 1 and not left[0].requires_grad:
        raise BractError(
            f"{observation.key}: {projection.name} is frozen, so its update shows no patch; attack "
            "with maui, which reads the trained head",
            code="attack-unsuited",
        )
    if len(left) != 1:
        raise BractError(
            f"{observation.key}: {projection.name} is called {len(left)} times an image, expected "
            "once",
            code="attack-unsuited",
        )
    names = list(learned)
    slope, *rest = torch.autograd.grad(
        (logits * weights).sum(), [left[0], *learned.values()], allow_unused=True
    )
    if slope is None:
        raise BractError(
            f"{observation.key}: the patches do not reach the loss", code="attack-unsuited"
        )
    rows = slope[0].flatten(1).T if slope.dim() == 4 else slope[0]
    return rows, {n: g for n, g in zip(names, rest, strict=True) if g is not None}
