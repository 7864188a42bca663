"""The variational bottleneck of PRECODE, before the output layer of any model."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from bract.crypto import SecretStream
from bract.errors import BractError
from bract.models.layers import last_linear, replace_layer
from bract.models.own_loss import OwnLoss


class VariationalBottleneck(OwnLoss):
    """Encode features to N(mu, sigma^2), sample ``latent`` values, decode to as many features.

    sigma = softplus(. - 5), so that training starts with little noise. In evaluation mode the mean
    is decoded. Its loss is the mean Kullback-Leibler divergence to N(0, 1) over the batch, times
    ``weight``.

    Attributes
    ----------
    noise
        A standard normal sample ``(B, latent)`` to use instead of a secret one; None unless an
        attacker who guesses it puts it there, as `torch.func.functional_call` does by this name.
    """

    noise: Tensor | None

    def __init__(self, features: int, *, latent: int, weight: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * latent)
        self.decoder = nn.Linear(latent, features)
        self.weight = weight
        self.register_buffer("noise", None, persistent=False)

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
        divergence = 0.5 * (mean.square() + variance - variance.log() - 1.0).sum(1).mean()
        if not self.training and self.noise is None:
            sample: Tensor = mean
        else:
            sample = mean + deviation * self._noise(mean)
        return self.with_term(self.decoder(sample), self.weight * divergence)

    def _noise(self, like: Tensor) -> Tensor:
        if self.noise is not None:
            return self.noise
        stream = self.stream or SecretStream.fresh()
        return stream.normal(like.shape).to(like)


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
