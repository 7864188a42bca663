"""Normalisation layers whose scale and shift come from a private key (FedKL).

The secrets are held outside the module tree on purpose: `torch.nn.Module.state_dict` and
``named_parameters`` never list them, so no code that exchanges those can send them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.crypto.randomness import Source, uniform_from
from bract.errors import BractError
from bract.models.layers import replace_layer


@dataclass
class LayerLock:
    """The secrets of one locked layer: the key ``(K,)`` and two ``Linear(K, channels)``.

    ``rate`` scales the gradient that reaches the two layers, so that they learn with that share of
    the learning rate.
    """

    key: Tensor
    scale: nn.Linear
    shift: nn.Linear
    relu: bool
    rate: float = 1.0

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return gamma and beta, each ``(channels,)``."""
        gamma, beta = self.scale(self.key), self.shift(self.key)
        if self.rate != 1.0 and gamma.requires_grad:
            for value in (gamma, beta):
                value.register_hook(lambda gradient: self.rate * gradient)
        return (F.relu(gamma), F.relu(beta)) if self.relu else (gamma, beta)


class LockedNorm(nn.Module):
    """A normalisation without parameters of its own, then ``gamma * x + beta``.

    Attributes
    ----------
    lock
        Where gamma and beta come from. None at the server: then they are 1 and 0.
    gamma, beta
        Each ``(channels,)``, instead of the lock's; None unless an attacker who regresses them
        puts them there, as `torch.func.functional_call` does by these names. Never exchanged.
    num_features
        Number of channels.
    """

    gamma: Tensor | None
    beta: Tensor | None
    lock: LayerLock | None
    num_features: int

    def _begin_unlocked(self) -> None:
        self.lock = None
        self.register_buffer("gamma", None, persistent=False)
        self.register_buffer("beta", None, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.lock is not None:
            self.lock.key = fn(self.lock.key)
            for layer in (self.lock.scale, self.lock.shift):
                layer._apply(fn)
        return self


class LockedLayerNorm(LockedNorm):
    """Layer normalisation of ``(..., channels)`` under a lock.

    Each token is normalised by its own mean and variance, so there are no statistics of a batch to
    exchange, and none that an attacker could match.
    """

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        (self.num_features,) = norm.normalized_shape
        self.eps = norm.eps
        self._begin_unlocked()

    def forward(self, tokens: Tensor) -> Tensor:
        """Normalise ``(..., channels)``, scale and shift."""
        gamma, beta = self.gamma, self.beta
        if (gamma is None or beta is None) and self.lock is not None:
            gamma, beta = self.lock.coefficients()
        return F.layer_norm(tokens, (self.num_features,), gamma, beta, self.eps)


class LockedBatchNorm2d(LockedNorm, nn.BatchNorm2d):
    """Batch normalisation under a lock."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        nn.BatchNorm2d.__init__(
            self,
            norm.num_features,
            eps=norm.eps,
            momentum=norm.momentum,
            affine=False,
            track_running_stats=norm.track_running_stats,
        )
        self._begin_unlocked()

    def forward(self, images: Tensor) -> Tensor:
        """Normalise ``(B, channels, H, W)``, scale and shift."""
        gamma, beta = self.gamma, self.beta
        if gamma is not None and beta is not None:
            normed = nn.BatchNorm2d.forward(self, images)
            scaled: Tensor = normed * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1)
            return scaled
        if self.lock is None:
            return nn.BatchNorm2d.forward(self, images)
        # One pass normalises, scales and shifts, as it does with parameters of the layer's own.
        track = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if track and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        keep = track or not self.training
        return F.batch_norm(
            images,
            self.running_mean if keep else None,
            self.running_var if keep else None,
            *self.lock.coefficients(),
            training=self.training or self.running_mean is None,
            momentum=momentum,
            eps=self.eps,
        )


@dataclass
class Lock:
    """The secrets of one client: its key and the lock layers of every locked normalisation.

    Attributes
    ----------
    key
        float32 ``(K,)`` in [0, 1).
    layers
        Name of the locked layer to its scale and shift, ``Linear(K, channels)`` each.
    relu
        Whether gamma and beta go through a ReLU.
    rate
        Share of the learning rate with which the lock layers learn.
    """

    key: Tensor
    layers: dict[str, tuple[nn.Linear, nn.Linear]]
    relu: bool = False
    rate: float = 1.0

    @classmethod
    def draw(
        cls,
        channels: Mapping[str, int],
        key_length: int,
        *,
        relu: bool = False,
        source: Source,
    ) -> Lock:
        """Draw a key from U[0, 1) and lock layers with PyTorch's bounds for linear layers.

        A client draws from a `bract.crypto.randomness.SecretStream`; an attacker from anything.

        Before the ReLU gamma and beta are near N(0, 1/9), whatever ``relu``: it is no part of the
        draw. With it half of the channels start at a gamma of zero, and those never learn.
        """
        key = uniform_from(source, (key_length,), 0.0, 1.0)
        layers = {
            name: (_linear(key_length, size, source), _linear(key_length, size, source))
            for name, size in channels.items()
        }
        return cls(key, layers, relu)

    @classmethod
    def of(cls, model: nn.Module) -> Lock:
        """Return the lock that is attached to ``model``; its layers are shared, not copied."""
        attached = {n: m.lock for n, m in key_locks(model).items() if m.lock is not None}
        if not attached:
            raise BractError("the model has no key-lock with a key attached", code="model-unsuited")
        first = next(iter(attached.values()))
        return cls(
            first.key,
            {name: (k.scale, k.shift) for name, k in attached.items()},
            first.relu,
            first.rate,
        )

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], *, relu: bool = False, rate: float = 1.0) -> Lock:
        """Rebuild from what `tensors` returned."""
        layers = {}
        for entry in tensors:
            if entry.endswith("/scale.weight"):
                name = entry.removesuffix("/scale.weight")
                layers[name] = (
                    _load_linear(tensors, f"{name}/scale"),
                    _load_linear(tensors, f"{name}/shift"),
                )
        return cls(tensors["key"].clone(), layers, relu, rate)

    def tensors(self) -> dict[str, Tensor]:
        """Return CPU copies: ``key``, then weight and bias of ``<layer>/scale`` and ``/shift``."""
        held = {"key": self.key.detach().cpu().clone()}
        for name, pair in self.layers.items():
            for part, layer in zip(("scale", "shift"), pair, strict=True):
                held[f"{name}/{part}.weight"] = layer.weight.detach().cpu().clone()
                held[f"{name}/{part}.bias"] = layer.bias.detach().cpu().clone()
        return held

    def coefficients(self) -> dict[str, Tensor]:
        """Return gamma and beta of every locked layer, named as the layer's own buffers."""
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, pair in self.layers.items():
                gamma, beta = LayerLock(self.key, *pair, self.relu, self.rate).coefficients()
                found |= {f"{name}.gamma": gamma, f"{name}.beta": beta}
        return found

    def to(self, device: torch.device | str) -> Lock:
        """Move the key and the layers, in place."""
        self.key = self.key.to(device)
        for pair in self.layers.values():
            for layer in pair:
                layer.to(device)
        return self

    def attach(self, model: nn.Module) -> nn.Module:
        """Unlock ``model`` with these secrets, in place; they are shared, not copied."""
        for name, module in key_locks(model).items():
            module.lock = LayerLock(self.key, *self.layers[name], self.relu, self.rate)
        return model


def insert_key_locks(model: nn.Module, *, blocks: Literal["first", "every"] = "first") -> nn.Module:
    """Replace normalisation layers by locked ones, in place.

    Those of batches, or, in a model without any, those of layers: the first one is then that of
    the first block, behind the patches. The layers keep their names, so buffers are exchanged as
    before; their weight and bias are gone. Server and clients call this alike.
    """
    batch = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    layer = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, nn.LayerNorm) and m.elementwise_affine and len(m.normalized_shape) == 1
    ]
    norms: list[tuple[str, nn.Module]] = [*batch] or [*layer]
    if not norms:
        raise BractError(
            f"FedKL needs a model with batch or layer normalisation, {type(model).__name__} has "
            f"none; {_how_to_normalise(model)}; of the zoo, lenet-bn, resnet20, vgg16-bn and vit "
            "have one",
            code="model-unsuited",
        )
    for name, norm in norms[:1] if blocks == "first" else norms:
        replace_layer(model, name, _locked(norm))
    return model


def _how_to_normalise(model: nn.Module) -> str:
    """Return the lines that add batch normalisation to a model, by its first convolution."""
    first = next(((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        return "it has no convolution to normalise: choose another defense"
    name, layer = first
    return (
        f"add it where the model is made, at the server and the clients alike: self.norm = "
        f"nn.BatchNorm2d({layer.out_channels}), and self.norm(self.{name}(x)) in place of "
        f"self.{name}(x)"
    )


def _locked(norm: nn.Module) -> LockedNorm:
    if isinstance(norm, nn.LayerNorm):
        return LockedLayerNorm(norm)
    assert isinstance(norm, nn.BatchNorm2d)
    return LockedBatchNorm2d(norm)


def key_locks(model: nn.Module) -> dict[str, LockedNorm]:
    """Return the locked normalisation layers of ``model`` by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LockedNorm)}


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for a client's optimizer: the shared ones and its own lock layers."""
    return [*nn.Module.parameters(model), *private_parameters(model)]


def private_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a client trains and never sends: its lock layers."""
    return [
        parameter
        for module in key_locks(model).values()
        if module.lock is not None
        for layer in (module.lock.scale, module.lock.shift)
        for parameter in layer.parameters()
    ]


def with_random_key(model: nn.Module, source: Source, *, keep_layers: bool = False) -> nn.Module:
    """Return a copy of ``model`` under a key of no client: what a server could evaluate.

    Parameters
    ----------
    keep_layers
        False: the lock layers are drawn anew too, as by an attacker who has neither (FedKL, table
        III). True: only the key is another one, as by an attacker who stole the lock layers.
    """
    stranger = copy.deepcopy(model)
    locks = key_locks(stranger)
    held = [module.lock for module in locks.values() if module.lock is not None]
    if not held:
        raise BractError("the model has no key-lock with a key attached", code="model-unsuited")
    channels = {name: module.num_features for name, module in locks.items()}
    drawn = Lock.draw(channels, len(held[0].key), relu=held[0].relu, source=source)
    if keep_layers:
        drawn.layers = Lock.of(stranger).layers
    drawn.to(held[0].key.device).attach(stranger)
    return stranger


def _empty_linear(inputs: int, outputs: int) -> nn.Linear:
    # Without a draw from the global generator, on which the rest of the run depends.
    return nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")


def _linear(inputs: int, outputs: int, source: Source) -> nn.Linear:
    layer = _empty_linear(inputs, outputs)
    bound = inputs**-0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(uniform_from(source, parameter.shape, -bound, bound))
    return layer


def _load_linear(tensors: Mapping[str, Tensor], name: str) -> nn.Linear:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    layer = _empty_linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer
