"""Layers of a target model that see the image: what enters and follows them, seen by probing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bract.attacks.problem.site import Site
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.models import tap
from bract.updates.update import Tensors

_PROBES = 16
_AFFINE = 1e-4
_CHUNK = 256

_NOISE = 0.02
"""Deviation of what is added to the parameters of the probe: an output layer of zeros, or blocks
that begin as the identity, would leave no gradient to compare."""

_EQUAL = 1e-3
"""Relative difference up to which two gradients of the probe, in float32, count as equal."""


@dataclass(frozen=True)
class FirstLayer:
    """The first linear layer, and the fixed affine map from the model's input to it.

    Attributes
    ----------
    layer
        Name of the module.
    matrix
        float64 ``(features, pixels)``; None where the flattened input itself enters.
    offset
        float64 ``(features,)``: what enters for an input of zeros.
    """

    layer: str
    matrix: Tensor | None
    offset: Tensor

    @property
    def site(self) -> Site:
        """The layer, whose bias' gradient fixes the scale of each example."""
        return Site(self.layer, biased=True)

    @property
    def mixes(self) -> bool:
        """Return whether several inputs enter the layer alike, so that the one of least norm is
        known.
        """
        return self.matrix is not None and self.matrix.shape[0] < self.matrix.shape[1]

    def images(self, features: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return the inputs ``(B, C, H, W)`` of least norm that make features ``(B, features)``."""
        if self.matrix is None:
            return features.view(-1, *shape)
        right = (features - self.offset).T
        flat: Tensor = torch.linalg.lstsq(self.matrix, right, driver="gelsd").solution
        return flat.T.reshape(-1, *shape)


def first_layer(target_model: TargetModel, observation: Observation) -> FirstLayer:
    """Find the first layer with parameters, and check that it is linear and has a ReLU behind it.

    Both are seen on probes, not read off names: what enters is affine in the image, and the
    loss' gradient is zero wherever what leaves is negative.
    """
    where = f"{observation.key}: model {target_model.declaration.model!r}"
    first = next(iter(target_model.parameter_names))
    name = first.removesuffix(".weight") if first != "weight" else ""
    module = target_model.model.get_submodule(name) if first.endswith("weight") else None
    if not isinstance(module, nn.Linear):
        kind = "no layer" if module is None else type(module).__name__
        raise BractError(
            f"{where} begins with {kind} at {first}, expected a linear layer; its gradient does "
            "not factor into one row an example",
            code="attack-unsuited",
        )
    if module.bias is None:
        raise BractError(
            f"{where}: {name or 'its first layer'} has no bias, whose gradient fixes the scale of "
            "each example",
            code="attack-unsuited",
        )
    probes = _random(target_model, _PROBES)
    seen, rectified = _rectified(target_model, observation, name, probes)
    if not rectified:
        raise BractError(
            f"{where}: no ReLU follows {name or 'its first layer'}; without one the loss' gradient "
            "has no zeros that separate examples",
            code="attack-unsuited",
        )
    return FirstLayer(name, *_map_to(target_model, observation, name, probes, seen))


def has_relu_behind(target_model: TargetModel, observation: Observation, name: str) -> bool:
    """Return whether a linear layer's output enters a ReLU alone, as seen on probes.

    Raises
    ------
    BractError
        If the layer is not called once, on one row an image.
    """
    return _rectified(target_model, observation, name, _random(target_model, _PROBES))[1]


def entering(
    target_model: TargetModel,
    observation: Observation,
    inputs: Tensor,
    *kinds: type[nn.Module],
) -> dict[str, Tensor]:
    """Return what enters layers when they are first called, by the layer's name.

    Parameters
    ----------
    inputs
        Normalised ``(B, C, H, W)``.
    kinds
        Of the layers; linear ones where none is given.
    """
    model, state = target_model.model, target_model.captured(observation)
    modules = tap.named(model, *(kinds or (nn.Linear,)))
    with torch.no_grad():
        return tap.inputs(lambda: functional_call(model, state, (inputs,)), model, modules)


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
    generator, state = torch.Generator().manual_seed(0), target_model.captured(observation)
    learned = {}
    for name in target_model.parameter_names:
        added = _NOISE * torch.randn(state[name].shape, generator=generator)
        learned[name] = (state[name] + added.to(state[name])).requires_grad_()
    probe = _random(target_model, 1)
    seen = _probed(target_model, observation, projection.name, probe, state | learned, learned)
    slope = seen.slopes[0]
    tokens = slope.flatten(1).T if seen.slopes.dim() == 4 else slope
    for name, gradient in seen.gradients.items():
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


def _map_to(
    target_model: TargetModel, observation: Observation, name: str, probes: Tensor, seen: Tensor
) -> tuple[Tensor | None, Tensor]:
    shape = tuple(probes.shape[1:])
    pixels = math.prod(shape)
    flat = probes.flatten(1)
    if seen.shape == flat.shape and torch.equal(seen, flat):
        return None, torch.zeros(pixels, dtype=torch.float64)

    def at(inputs: Tensor) -> Tensor:
        return entering(target_model, observation, inputs)[name].to(torch.float64)

    offset = at(torch.zeros(1, *shape))[0]
    units = torch.eye(pixels).view(-1, *shape)
    columns = torch.cat([at(part) for part in torch.split(units, _CHUNK)]) - offset
    expected = flat.to(torch.float64) @ columns + offset
    apart = float((expected - seen).abs().max())
    if not apart <= _AFFINE * float(seen.abs().max()):
        raise BractError(
            f"{observation.key}: model {target_model.declaration.model!r} changes the image by "
            "more than an affine map before its first linear layer; its input cannot be traced "
            "back to pixels",
            code="attack-unsuited",
        )
    return columns.T.contiguous(), offset


def _rectified(
    target_model: TargetModel, observation: Observation, name: str, probes: Tensor
) -> tuple[Tensor, bool]:
    """Return what enters a layer, and whether a ReLU follows it.

    The loss' gradient then is zero where what left the layer is negative, and only there.
    """
    state = target_model.captured(observation)
    weight = Site(name).weight
    learned = {weight: state[weight].detach().clone().requires_grad_()}
    probe = _probed(target_model, observation, name, probes, state | learned, {})
    if probe.entered.dim() != 2:
        raise BractError(
            f"{observation.key}: {name or 'the first layer'} sees an image in several rows, "
            "expected one row an image",
            code="attack-unsuited",
        )
    off, slopes = probe.left < 0, probe.slopes
    found = not bool((slopes[off] != 0).any()) and bool((slopes[~off] != 0).any())
    return probe.entered, found


@dataclass(frozen=True)
class _Probe:
    """Observations of a layer while a model ran on a probe, and a random gradient went back.

    ``gradients`` are those of parameters that reach the loss, by name.
    """

    entered: Tensor
    left: Tensor
    slopes: Tensor
    gradients: Tensors


def _probed(
    target_model: TargetModel,
    observation: Observation,
    name: str,
    probes: Tensor,
    state: Tensors,
    learned: Tensors,
) -> _Probe:
    """Run a layer that is called once, with gradients at what leaves it and at ``learned``."""
    entered: list[Tensor] = []
    left: list[Tensor] = []
    model = target_model.model
    with (
        tap.entering(model, [name], lambda _, value: entered.append(value.detach())),
        tap.leaving(model, [name], lambda _, made: left.append(made)),
    ):
        logits = functional_call(model, state, (probes,))
    key, layer = observation.key, name or "the first layer"
    if len(left) != 1:
        raise BractError(
            f"{key}: {layer} is called {len(left)} times an image, expected once",
            code="attack-unsuited",
        )
    if not left[0].requires_grad:
        raise BractError(
            f"{key}: {layer} is frozen, so its update shows no patch; attack with maui, which "
            "reads the trained head",
            code="attack-unsuited",
        )
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    slopes, *rest = torch.autograd.grad(
        (logits * weights).sum(), [left[0], *learned.values()], allow_unused=True
    )
    if slopes is None:
        raise BractError(
            f"{key}: what leaves {layer} does not reach the loss", code="attack-unsuited"
        )
    gradients = {n: g for n, g in zip(learned, rest, strict=True) if g is not None}
    return _Probe(entered[0].cpu(), left[0].detach().cpu(), slopes.cpu(), gradients)


def _random(target_model: TargetModel, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *target_model.image_shape, generator=generator)
