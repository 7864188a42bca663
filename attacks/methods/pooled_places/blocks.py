"""Find convolutions with a monotone activation and max pooling, in front of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bract.attacks.methods.r_gap.activations import ACTIVATIONS, Activation
from bract.attacks.problem.case import Case
from bract.attacks.problem.site import Site
from bract.attacks.problem.visibility import smooth_images
from bract.errors import BractError
from bract.models import tap

_PROBES = 2
_WINDOWS = (1, 2, 3, 4)
_EQUAL = 1e-9


@dataclass(frozen=True)
class Block:
    """A convolution, an activation, and a max pooling whose cells do not overlap.

    Attributes
    ----------
    layer
        Name of the convolution.
    stride, padding
        Of the convolution, down and across.
    entered
        Shape ``(I, H, W)`` of what enters it.
    activation
        What follows it, before or after the pooling.
    window
        Side of a cell; 1 where nothing is pooled.
    """

    layer: str
    stride: tuple[int, int]
    padding: tuple[int, int]
    entered: tuple[int, int, int]
    activation: Activation
    window: int

    @property
    def site(self) -> Site:
        """The convolution, with its bias."""
        return Site(self.layer, biased=True)


@dataclass(frozen=True)
class Blocks:
    """Blocks from the image on, and the linear layer that what leaves the last of them enters."""

    each: tuple[Block, ...]
    dense: Site

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are read."""
        return (*(block.site.weight for block in self.each), *self.dense.names)


@dataclass(frozen=True)
class _Call:
    """A call of a layer: what entered it, and what left."""

    name: str
    module: nn.Module
    entered: Tensor
    left: Tensor


def pooled_blocks(case: Case) -> Blocks:
    """Find the blocks of a model on probes, not by name.

    Raises
    ------
    BractError
        If the model does not begin with convolutions of this kind, none is pooled, or no linear
        layer with a bias follows.
    """
    where = f"{case.observation.key}: model {case.target_model.declaration.model!r}"
    calls, probe = _calls(case)
    place = next((i for i, call in enumerate(calls) if isinstance(call.module, nn.Linear)), 0)
    if not place or not torch.equal(calls[0].entered, probe):
        raise BractError(
            f"{where} does not see the image by convolutions that a linear layer follows; "
            "pooled-places reads what enters that layer",
            code="attack-unsuited",
        )
    dense = calls[place]
    if dense.module.bias is None or dense.entered.dim() != 2:
        raise BractError(
            f"{where}: {dense.name} has no bias, or sees an image in several rows; pooled-places "
            "needs both to read what enters it",
            code="attack-unsuited",
        )
    each = tuple(_block(where, call, after) for call, after in pairwise(calls[: place + 1]))
    if all(block.window == 1 for block in each):
        raise BractError(
            f"{where} has no max pooling; attack with r-gap, which needs none",
            code="attack-unsuited",
        )
    return Blocks(each, Site(dense.name, biased=True))


def _calls(case: Case) -> tuple[list[_Call], Tensor]:
    """Return the calls of convolutions and linear layers in their order, and the probe."""
    target_model = case.target_model
    state = target_model.captured(case.observation, torch.float64)
    generator = torch.Generator().manual_seed(0)
    images = smooth_images(_PROBES, target_model.image_shape, generator)
    probe = target_model.normalise(images.double())
    model, entered, calls = target_model.model, dict[str, Tensor](), list[_Call]()
    names = tap.named(model, nn.Conv2d, nn.Linear)

    def left(name: str, made: Tensor) -> None:
        calls.append(_Call(name, model.get_submodule(name), entered[name], made))

    with (
        torch.no_grad(),
        tap.entering(model, names, lambda name, value: entered.update({name: value})),
        tap.leaving(model, names, left),
    ):
        functional_call(model, state, (probe,))
    return calls, probe


def _block(where: str, call: _Call, after: _Call) -> Block:
    """Return the block of a convolution by what enters the layer after it."""
    module = call.module
    assert isinstance(module, nn.Conv2d)
    plain = (
        module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.bias is not None
    )
    found = _between(call.left, after.entered) if plain else None
    if found is None:
        raise BractError(
            f"{where}: between {call.name} and {after.name} there is more than a known activation "
            "and a max pooling without overlap, or the convolution is dilated, grouped or without "
            "a bias; pooled-places needs blocks of these alone",
            code="attack-unsuited",
        )
    assert not isinstance(module.padding, str)
    _, channels, height, width = call.entered.shape
    stride, padding = (_pair(value) for value in (module.stride, module.padding))
    return Block(call.name, stride, padding, (channels, height, width), *found)


def _between(left: Tensor, entered: Tensor) -> tuple[Activation, int] | None:
    """Return the activation and the pooling that make what enters of what left."""
    for window in _WINDOWS:
        pooled = F.max_pool2d(left, window) if min(left.shape[2:]) >= window else left
        if pooled.flatten(1).shape != entered.flatten(1).shape:
            continue
        for made in ACTIVATIONS.values():
            activation = made()
            found = activation.forward(pooled).flatten(1)
            if torch.allclose(found, entered.flatten(1), rtol=_EQUAL, atol=_EQUAL):
                return activation, window
    return None


def _pair(values: Sequence[int]) -> tuple[int, int]:
    down, across = values
    return down, across
