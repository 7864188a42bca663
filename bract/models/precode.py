"""The variational bottleneck of PRECODE, before the output layer of any model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.crypto.randomness import SecretStream
from bract.errors import BractError
from bract.models.layers import last_linear, replace_layer


class VariationalBottleneck(nn.Module):
    """Encode features to N(mu, sigma^2), sample ``latent`` values, decode to as many features.

    sigma = softplus(. - 5), so that training starts with little noise. In evaluation mode the mean
    is decoded.

    Attributes
    ----------
    stream
        Where the sample comes from; None takes a fresh key from the operating system each time,
        because a server that can replay the noise undoes the defense.
    noise
        A standard normal sample ``(B, latent)`` to use instead; None unless an attacker who
        guesses it puts it there, as `torch.func.functional_call` does by this name.
    divergence
        Mean Kullback-Leibler divergence to N(0, 1) over the last batch.
    adds_loss
        Whether training adds ``weight * divergence`` to the loss by itself, for a training loop
        that does not know of it (`auxiliary_loss`). What the loss prints as stays the same.
    """

    noise: Tensor | None

    def __init__(self, features: int, *, latent: int, weight: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * latent)
        self.decoder = nn.Linear(latent, features)
        self.weight = weight
        self.stream: SecretStream | None = None
        self.register_buffer("noise", None, persistent=False)
        self.divergence: Tensor | None = None
        self.adds_loss = False

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``(B, F)`` to features ``(B, F)``; a `BractError` for rows of tokens."""
        if features.dim() != 2:
            raise BractError(
                f"defense 'precode': {tuple(features.shape)} enters the last linear layer, "
                "expected one row an example; take another model or defense",
                code="defense-unsuited",
            )
        mean, width = self.encoder(features).chunk(2, dim=1)
        deviation = F.softplus(width - 5.0)
        variance = deviation.square()
        self.divergence = 0.5 * (mean.square() + variance - variance.log() - 1.0).sum(1).mean()
        if not self.training and self.noise is None:
            sample: Tensor = mean
        else:
            sample = mean + deviation * self._noise(mean)
        decoded: Tensor = self.decoder(sample)
        if self.adds_loss and self.training:
            decoded = _AddedLoss.apply(decoded, self.weight * self.divergence)
        return decoded

    def __getstate__(self) -> dict[str, Any]:
        # The last batch's graph cannot be copied, and a copy of the model has seen no batch.
        return {**self.__dict__, "divergence": None}

    def _noise(self, like: Tensor) -> Tensor:
        if self.noise is not None:
            return self.noise
        stream = self.stream or SecretStream.fresh()
        return stream.normal(like.shape).to(like)


class _AddedLoss(torch.autograd.Function):
    """Pass features on, and let ``loss`` take part in whatever loss is made of them."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, loss: Tensor) -> Tensor:
        del ctx, loss
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return gradients[0], gradients[0].new_ones(())


def insert_bottleneck(model: nn.Module, *, latent: int = 256, weight: float = 1e-3) -> nn.Module:
    """Put a bottleneck before the last linear layer, in place; server and clients call it alike.

    A model that has one stays as it is.
    """
    if bottlenecks(model):
        return model
    name, layer = last_linear(model)
    bottleneck = VariationalBottleneck(layer.in_features, latent=latent, weight=weight)
    bottleneck.to(layer.weight.device, layer.weight.dtype)
    parts: OrderedDict[str, nn.Module] = OrderedDict(bottleneck=bottleneck, output=layer)
    replace_layer(model, name, nn.Sequential(parts))
    return model


def bottlenecks(model: nn.Module) -> list[VariationalBottleneck]:
    """Return the bottlenecks of ``model``."""
    return [m for m in model.modules() if isinstance(m, VariationalBottleneck)]


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the model's own loss term of the batch it saw last; 0 for most models."""
    total = torch.zeros(())
    for block in bottlenecks(model):
        if block.divergence is not None:
            total = total.to(block.divergence.device) + block.weight * block.divergence
    return total
