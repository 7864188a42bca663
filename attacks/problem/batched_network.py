"""One architecture with other parameters in every trial, as few large operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from bract.models.keylock import LockedBatchNorm2d
from bract.models.own_loss import OwnLoss
from bract.updates.ties import ties_of
from bract.updates.update import Tensors

_LEAVE_TRIALS = (
    nn.Sigmoid,
    nn.ReLU,
    nn.Tanh,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.Identity,
    nn.Dropout,
)
_FOLD_TRIALS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_ELEMENTWISE: dict[Any, Callable[..., Tensor]] = {
    operator.add: operator.add,
    torch.add: torch.add,
    operator.mul: operator.mul,
    torch.sigmoid: torch.sigmoid,
    torch.relu: torch.relu,
    F.relu: F.relu,
    F.sigmoid: F.sigmoid,
}

OWN_CONVOLUTION = 4
"""Images of a trial from which on a processor convolves trial by trial. Gradient and second
derivative of a ResNet-20 take 17 ms an image so with batches of 4, 36 ms as products of matrices;
with single images the products are as fast, through LeNets faster."""

_Value = Any
_Step = Callable[[dict[str, _Value], Tensors], _Value]


class BatchedNetwork:
    """Runs a traced model on ``(L, B, C, H, W)`` with parameters ``(L, ...)``.

    The same numbers as `torch.func.vmap` over `torch.func.functional_call`, to rounding, but
    without its bookkeeping for every operation, and with convolutions as products of matrices:
    `vmap` makes grouped convolutions, whose second derivatives PyTorch computes group by group.

    Use `of`, which returns None for models with layers that it does not know.
    """

    def __init__(
        self,
        steps: list[tuple[str, _Step]],
        result: str,
        source: str,
        norms: dict[str, str],
        ties: Mapping[str, str],
    ) -> None:
        self._steps = steps
        self._ties = ties
        self._norms = norms
        self._result = result
        self._source = source

    @classmethod
    def of(cls, model: nn.Module) -> BatchedNetwork | None:
        """Trace a model in the mode it is in; None where `torch.func.vmap` has to do.

        Batch normalisation is known with the batch's own statistics, or fixed ones.
        """
        try:
            graph = Tracer().trace(model)
        except (fx.proxy.TraceError, TypeError, ValueError, AttributeError, RuntimeError):
            # Control flow on values, or arguments that cannot be traced.
            return None
        modules = dict(model.named_modules())
        steps: list[tuple[str, _Step]] = []
        norms: dict[str, str] = {}
        source = result = ""
        for node in graph.nodes:
            if node.op == "placeholder" and not source:
                source = node.name
            elif node.op == "output" and isinstance(node.args[0], fx.Node):
                result = node.args[0].name
            else:
                step = _step_of(node, modules)
                if step is None:
                    return None
                steps.append((node.name, step))
                if isinstance(modules.get(str(node.target)), nn.BatchNorm2d):
                    norms[str(node.target)] = str(node.args[0])
        return cls(steps, result, source, norms, ties_of(model)) if source and result else None

    def __call__(self, state: Tensors, inputs: Tensor) -> Tensor:
        """Return logits ``(L, B, classes)``; ``state`` holds parameters and buffers."""
        result: Tensor = self._run(state, inputs)[self._result]
        return result

    def normalised(self, state: Tensors, inputs: Tensor) -> Tensors:
        """Return what enters each batch normalisation, ``(L, B, channels, H, W)`` by layer."""
        values = self._run(state, inputs)
        return {layer: values[source] for layer, source in self._norms.items()}

    def _run(self, state: Tensors, inputs: Tensor) -> dict[str, _Value]:
        # Observations hold a tied parameter under its first name.
        state = state | {name: state[first] for name, first in self._ties.items()}
        values: dict[str, _Value] = {self._source: inputs}
        for name, step in self._steps:
            values[name] = step(values, state)
        return values


class Tracer(fx.Tracer):
    """Traces a model with locked layers, and those of a loss of their own, as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one step of the trace."""
        own = isinstance(m, LockedBatchNorm2d | OwnLoss)
        return own or super().is_leaf_module(m, module_qualified_name)


def _step_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> _Step | None:
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        name = str(node.target)
        layer = _layer_of(name, modules[name])
        (argument,) = node.args
        if layer is None or not isinstance(argument, fx.Node):
            return None
        source = argument.name
        return lambda values, state: layer(values[source], state)
    if node.op == "call_function" and node.target in _ELEMENTWISE:
        function = _ELEMENTWISE[node.target]
        return _call(node, function)
    if node.op == "call_function" and node.target is operator.getitem:
        return _call(node, _take) if _is_slices(node.args[1]) else None
    if node.op == "call_function" and node.target is F.pad:
        return _call(node, F.pad)
    if node.target in (torch.flatten, "flatten") and node.args[1:] == (1,) and not node.kwargs:
        return _call(node, lambda x, _: x.flatten(2))
    if node.op == "call_method" and node.target == "mean":
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if isinstance(dims, tuple) and all(isinstance(d, int) and d > 0 for d in dims):
            source = str(node.args[0])
            shifted = tuple(d + 1 for d in dims if isinstance(d, int))
            return lambda values, _: values[source].mean(dim=shifted)
    return None


def _call(node: fx.Node, function: Callable[..., Tensor]) -> _Step:
    def step(values: dict[str, _Value], _: Tensors) -> _Value:
        args = fx.node.map_arg(node.args, lambda n: values[n.name])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n.name])
        return function(*args, **kwargs)

    return step


def _is_slices(index: Any) -> bool:
    return isinstance(index, tuple) and all(isinstance(part, slice) for part in index)


def _take(x: Tensor, index: tuple[slice, ...]) -> Tensor:
    return x[(slice(None), *index)]


_Layer = Callable[[Tensor, Tensors], Tensor]


def _layer_of(name: str, module: nn.Module) -> _Layer | None:
    kind = type(module)
    if kind is nn.Conv2d:
        assert isinstance(module, nn.Conv2d)
        plain = module.groups == 1 and module.padding_mode == "zeros"
        if not plain or isinstance(module.padding, str):
            return None
        return _Convolution.of(name, module)
    if kind is nn.Linear:
        return _linear(name)
    if isinstance(module, nn.BatchNorm2d) and kind in (nn.BatchNorm2d, LockedBatchNorm2d):
        scales = ("weight", "bias") if kind is nn.BatchNorm2d else ("gamma", "beta")
        return _normalisation(name, module, scales)
    if kind is nn.Flatten:
        assert isinstance(module, nn.Flatten)
        return (
            (lambda x, _: x.flatten(2)) if (module.start_dim, module.end_dim) == (1, -1) else None
        )
    if kind in _FOLD_TRIALS:
        return lambda x, _: module(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    if kind in _LEAVE_TRIALS:
        return lambda x, _: module(x)
    return None


@dataclass(frozen=True)
class _Convolution:
    """Patches as columns, then one matrix product a trial; or a convolution a trial."""

    weight: str
    bias: str | None
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, name: str, module: nn.Conv2d) -> _Convolution:
        def pair(value: Any) -> tuple[int, int]:
            first, second = value
            return int(first), int(second)

        return cls(
            weight=_join(name, "weight"),
            bias=None if module.bias is None else _join(name, "bias"),
            size=pair(module.kernel_size),
            stride=pair(module.stride),
            padding=pair(module.padding),
            dilation=pair(module.dilation),
        )

    def __call__(self, x: Tensor, state: Tensors) -> Tensor:
        trials, images, _, *sides = x.shape
        if images >= OWN_CONVOLUTION and x.device.type == "cpu":
            return self._by_trial(x, state)
        patches = F.unfold(x.flatten(0, 1), self.size, self.dilation, self.padding, self.stride)
        if images > 1:
            patches = patches.view(trials, images, *patches.shape[1:]).transpose(1, 2).flatten(2)
        weight = state[self.weight].flatten(2)
        if self.bias is None:
            made = torch.bmm(weight, patches)
        else:
            made = torch.baddbmm(state[self.bias][:, :, None], weight, patches)
        height, width = (
            (side + 2 * pad - spread * (kernel - 1) - 1) // step + 1
            for side, pad, spread, kernel, step in zip(
                sides, self.padding, self.dilation, self.size, self.stride, strict=True
            )
        )
        return made.view(trials, -1, images, height, width).transpose(1, 2)

    def _by_trial(self, x: Tensor, state: Tensors) -> Tensor:
        """Convolve each trial's images by its own weights."""
        biases = [None] * len(x) if self.bias is None else state[self.bias].unbind()
        return torch.stack(
            [
                F.conv2d(own, weight, bias, self.stride, self.padding, self.dilation)
                for own, weight, bias in zip(
                    x.unbind(), state[self.weight].unbind(), biases, strict=True
                )
            ]
        )


def _linear(name: str) -> _Layer:
    weight, bias = _join(name, "weight"), _join(name, "bias")

    def layer(x: Tensor, state: Tensors) -> Tensor:
        rows = state[weight].transpose(1, 2)
        if bias not in state:
            return torch.bmm(x, rows)
        return torch.baddbmm(state[bias][:, None], x, rows)

    return layer


def _normalisation(name: str, module: nn.BatchNorm2d, scales: tuple[str, str]) -> _Layer:
    names = [_join(name, part) for part in ("running_mean", "running_var", *scales)]
    training = module.training or module.running_mean is None
    eps = module.eps

    def layer(x: Tensor, state: Tensors) -> Tensor:
        trials, images, channels, height, width = x.shape
        rows = x.transpose(0, 1).reshape(images, trials * channels, height, width)
        mean, variance, scale, shift = (state[n].flatten() if n in state else None for n in names)
        if training:
            mean = variance = None
        made = F.batch_norm(rows, mean, variance, scale, shift, training=training, eps=eps)
        return made.view(images, trials, channels, height, width).transpose(0, 1)

    return layer


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
