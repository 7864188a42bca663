"""A second derivative of ReLU, so that a search sees that units could switch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_RECTIFIERS = frozenset(
    {F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}
)
_IN_PLACE = frozenset({F.relu_, torch.relu_, torch.Tensor.relu_})
_SMALLEST = 1e-30


class SwitchingUnits(TorchFunctionMode):
    """Computes ReLUs of a network whose gradient is differentiated once more.

    Values and first derivatives are those of ReLU, so that the gradient of the loss is the
    client's. Only the derivative of the slope differs: autograd takes that of a step as zero,
    and a search on gradients never learns that an image near by switches other units on. Here it is
    a normal density around the kink, as surrogate gradients are of spiking networks (Neftci et al.
    2019).

    Parameters
    ----------
    width
        Standard deviation of the density, in root mean squares of a trial's values before the ReLU.
    """

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace a ReLU; run everything else as it is."""
        del types
        if func not in _RECTIFIERS:
            return func(*args, **(kwargs or {}))
        values = args[0] if args else (kwargs or {})["input"]
        if func in _IN_PLACE or (kwargs or {}).get("inplace") or args[1:2] == (True,):
            return values.copy_(_Rectified.apply(values.clone(), self.width))
        return _Rectified.apply(values, self.width)


class _Rectified(torch.autograd.Function):
    """ReLU, whose slope is `_Step`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, width: float) -> Tensor:
        del width
        return values.clamp_min(0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        del output
        ctx.save_for_backward(inputs[0])
        ctx.width = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (values,) = ctx.saved_tensors
        return gradients[0] * _Step.apply(values, ctx.width), None


class _Step(torch.autograd.Function):
    """1 above zero, else 0; its derivative is a normal density."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, width: float) -> Tensor:
        del width
        return (values > 0.0).to(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        del output
        ctx.save_for_backward(inputs[0])
        ctx.width = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (values,) = ctx.saved_tensors
        others = tuple(range(1, values.dim()))
        scale = ctx.width * values.detach().square().mean(dim=others, keepdim=True).sqrt()
        deviations = values.detach() / scale.clamp_min(_SMALLEST)
        density = torch.exp(-0.5 * deviations.square()) / scale.clamp_min(_SMALLEST)
        density = torch.where(scale > _SMALLEST, density, 0.0)
        return gradients[0] * density / math.sqrt(2.0 * math.pi), None
