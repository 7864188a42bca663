"""Linear layers of a target model: what enters them, and what follows them, seen by probing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bract import tap
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.reading.site import Site
from bract.errors import BractError
from bract.protocol.observation import Observation

_PROBES = 16
_AFFINE = 1e-4
_CHUNK = 256


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
    def weight(self) -> str:
        """Name of its weight."""
        return self.site.weight

    @property
    def bias(self) -> str:
        """Name of its bias."""
        return self.site.bias

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
    shape = target_model.image_shape
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
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(_PROBES, *shape, generator=generator)
    seen, left, slopes = _probe(target_model, observation, name, probes)
    if not _rectified(left, slopes):
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
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(_PROBES, *target_model.image_shape, generator=generator)
    _, left, slopes = _probe(target_model, observation, name, probes)
    return _rectified(left, slopes)


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


def _probe(
    target_model: TargetModel, observation: Observation, name: str, probes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what enters a layer, what leaves it, and a gradient of what leaves it."""
    entered: list[Tensor] = []
    cuts: list[Tensor] = []

    def cut(_: str, output: Tensor) -> Tensor:
        cuts.append(output.detach().requires_grad_())
        return cuts[-1]

    model, state = target_model.model, target_model.captured(observation)
    with (
        tap.entering(model, [name], lambda _, value: entered.append(value.detach())),
        tap.leaving(model, [name], cut),
    ):
        logits = functional_call(model, state, (probes,))
    if len(cuts) != 1 or entered[0].dim() != 2:
        raise BractError(
            f"{observation.key}: {name or 'the first layer'} sees an image in {len(cuts)} calls "
            "or in several rows, expected one row an image",
            code="attack-unsuited",
        )
    (seen,), (left,) = entered, cuts
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (slopes,) = torch.autograd.grad((logits * weights).sum(), left)
    return seen.cpu(), left.detach().cpu(), slopes.cpu()


def _rectified(left: Tensor, slopes: Tensor) -> bool:
    """Return whether the loss' gradient is zero where what left a layer is negative, and only
    there.
    """
    off = left < 0
    return not bool((slopes[off] != 0).any()) and bool((slopes[~off] != 0).any())
