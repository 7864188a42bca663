"""Dropout (Srivastava et al. 2014) in a model whose tensors keep their names."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from bract.crypto.randomness import Source, uniform_from
from bract.errors import BractError, apart
from bract.models.layers import last_linear, replace_layer

_Dropouts = nn.modules.dropout._DropoutNd

_PASSING = (nn.Flatten, nn.ReLU, nn.Identity)
"""What a mask passes through: it only moves features, or scales with them."""

_PASSING_FUNCTIONS = (torch.flatten, torch.relu, F.relu)


class SeededDropout(nn.Dropout):
    """Inverted dropout, whose mask is drawn on the CPU from a source where one is given.

    So the mask is the same on every device, and no secret that is drawn elsewhere shares its
    generator.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)
        self.source: Source | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Zero each feature with probability ``p`` and divide the others by ``1 - p``."""
        if not self.training or self.p == 0.0 or self.source is None:
            return super().forward(features)
        kept = uniform_from(self.source, features.shape, 0.0, 1.0) >= self.p
        return features * (kept.to(features) / (1.0 - self.p))


class LinearAfterDropout(nn.Linear):
    """A linear layer with dropout before it; parameters are called as those of the layer alone."""

    def __init__(self, layer: nn.Linear, rate: float) -> None:
        # What the layer holds is taken over, not drawn: the model's start stays the seed's.
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.dropout = SeededDropout(rate)

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``(..., in)`` to ``(..., out)``."""
        return super().forward(self.dropout(features))


def with_dropout(model: nn.Module, rate: float | None, *, classes: int) -> nn.Module:
    """Give a model a rate of dropout, in place, and return it.

    Parameters
    ----------
    rate
        In [0, 1), of every dropout layer that the model has; where it has none, of one before the
        linear layer that makes the logits. None leaves the rates as they are.
    classes
        Outputs of that layer.
    """
    own = [(n, m) for n, m in model.named_modules() if isinstance(m, _Dropouts)]
    for name, module in own:
        if rate is not None:
            module.p = rate
        if type(module) is nn.Dropout:
            replace_layer(model, name, SeededDropout(module.p))
    if own or not rate:
        return model
    try:
        name, layer = last_linear(model)
    except BractError as error:
        raise BractError(
            f"training.dropout is {rate:g}: {error}, or dropout: null", code=error.code
        ) from None
    if layer.out_features != classes or not name:
        raise BractError(
            f"training.dropout is {rate:g}: {type(model).__name__} has no dropout layer, and its "
            f"last linear layer ({name or 'the model itself'}) has {layer.out_features} outputs, "
            f"expected one of several layers with {classes}, one a class; give the model a "
            "torch.nn.Dropout, or set dropout: null",
            code="model-unsuited",
        )
    replace_layer(model, name, LinearAfterDropout(layer, rate))
    return model


def seed_dropout(model: nn.Module, source: Source | None) -> None:
    """Let the masks of every `SeededDropout` of a model come from ``source``; None: from torch."""
    for module in model.modules():
        if isinstance(module, SeededDropout):
            module.source = source


def dropout_rate(model: nn.Module) -> float | None:
    """Return the rate of a model's dropout layers: 0 where it has none, None where they differ."""
    rates = {m.p for m in model.modules() if isinstance(m, _Dropouts)} or {0.0}
    return rates.pop() if len(rates) == 1 else None


def masked_layers(model: nn.Module) -> dict[str, float] | None:
    """Return each linear layer whose inputs dropout masks, by name, with the rate.

    A mask on the inputs of a linear layer is one on the columns of its weights, and the columns of
    dropped inputs have a gradient of exactly zero, for one example.

    Returns
    -------
    dict or None
        Empty where the model has no dropout; None where a dropout layer's mask does not reach a
        linear layer unchanged, or the model cannot be traced.
    """
    modules = dict(model.named_modules())
    wanted = {n for n, m in modules.items() if isinstance(m, _Dropouts)}
    if not wanted:
        return {}
    try:
        with apart():
            graph = fx.Tracer().trace(model)
    except Exception:  # noqa: BLE001 - a third-party forward may raise anything under a tracer
        return None
    found: dict[str, float] = {}
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in wanted:
            continue
        linear = _linear_after(node, modules)
        if linear is None or linear in found:
            return None
        found[linear] = modules[node.target].p
        wanted.discard(node.target)
    return None if wanted else found


def _linear_after(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Return the linear layer that alone takes what a dropout layer leaves."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.op == "call_function" and node.target in _PASSING_FUNCTIONS:
            continue
        if node.op == "call_method" and node.target in ("flatten", "relu"):
            continue
        if node.op != "call_module":
            return None
        module = modules[str(node.target)]
        if isinstance(module, nn.Linear):
            return str(node.target)
        if not isinstance(module, _PASSING):
            return None
    return None
