"""Traits of a model that settings depend on, read off one forward pass, never off a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bract.attacks.problem.uncompiled import Watch
from bract.errors import BractError, apart, first_line

SHALLOW_LAYERS = 8
"""Most layers with weights of a model that counts as shallow. The LeNets of the attack papers have
4 and 5, with PRECODE's bottleneck 8; the smallest residual network of the zoo has 20."""

_KINKS = (
    "relu",
    "leaky_relu",
    "prelu",
    "rrelu",
    "threshold",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "clamp",
    "abs",
    "max_pool",
    "adaptive_max_pool",
    "maximum",
    "minimum",
    "amax",
    "amin",
    "sort",
    "topk",
)
_EXACT_KINKS = ("max", "min")
_ATTENTION = ("_softmax", "_scaled_dot_product", "_native_multi_head_attention")


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model that one forward pass shows.

    Attributes
    ----------
    weight_layers
        Parameters of two and more dimensions: convolutions, linear layers, embeddings.
    smooth
        Whether no operation of the pass has kinks, as ReLU and max pooling have.
    rectified
        Whether an operation other than pooling has some.
    attends
        Whether tokens are weighted by a softmax, as in a transformer.
    """

    weight_layers: int
    smooth: bool
    rectified: bool = False
    attends: bool = False

    @property
    def shallow(self) -> bool:
        """Return whether the model is about as deep as a LeNet."""
        return self.weight_layers <= SHALLOW_LAYERS


def traits_of(model: nn.Module, image_shape: Sequence[int]) -> ModelTraits:
    """Run a model once on grey images and look at its operations.

    Modules and functional calls look alike here. Parameters and buffers stay as they are.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` of one input.
    """
    parameter = next(model.parameters(), torch.zeros(()))
    images = torch.full((2, *image_shape), 0.5, device=parameter.device, dtype=parameter.dtype)
    kept = {name: value.clone() for name, value in model.named_buffers()}
    watch = _Watch()
    try:
        with torch.no_grad(), watch, apart():
            model(images)
    except Exception as error:  # a third-party forward may raise anything
        raise BractError(
            f"the model does not take images of shape {tuple(image_shape)}: "
            f"{first_line(error)}; declare the input that the clients trained on",
            code="declaration-wrong",
        ) from error
    finally:
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(kept[name])
    layers = sum(value.dim() >= 2 for value in model.parameters())
    rectified = any("pool" not in kink for kink in watch.kinks)
    return ModelTraits(
        weight_layers=layers,
        smooth=not watch.kinks,
        rectified=rectified,
        attends=watch.attends,
    )


class _Watch(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.kinks: set[str] = set()
        self.attends = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        name = str(getattr(func, "_opname", func)).rstrip("_")
        if name.startswith(_KINKS) or name in _EXACT_KINKS:
            self.kinks.add(name)
        if name.startswith(_ATTENTION):
            self.attends = True
        return func(*args, **dict(kwargs or {}))
