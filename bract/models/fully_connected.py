"""A multilayer perceptron on the flattened image."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from bract.config.signal import SignalSchema
from bract.models.registry import MODELS, activation_layer

HIDDEN = (256, 256)
"""Units of the hidden layers of ``mlp``."""


@MODELS.register("mlp")
def mlp(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    signal: SignalSchema | None = None,
) -> nn.Module:
    """Build two hidden layers of 256 units; 330,762 parameters for 32x32 grey and ten classes."""
    return perceptron(HIDDEN, classes, channels, image_size, activation, signal)


def perceptron(
    hidden: tuple[int, ...],
    classes: int,
    channels: int,
    image_size: int,
    activation: str,
    signal: SignalSchema | None = None,
) -> nn.Module:
    """Build a perceptron with hidden layers of these many units, on images or on signals."""
    values = channels * (image_size**2 if signal is None else signal.length)
    sizes = (values, *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for entering, leaving in pairwise(sizes):
        layers += [nn.Linear(entering, leaving), activation_layer(activation)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


@MODELS.register("mlp-100")
def mlp_100(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    signal: SignalSchema | None = None,
) -> nn.Module:
    """Build two hidden layers of 100 units, as in attacks on tables (Vero et al. 2023)."""
    return perceptron((100, 100), classes, channels, image_size, activation, signal)


@MODELS.register("linear")
@MODELS.register("logistic")
def linear(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    signal: SignalSchema | None = None,
) -> nn.Module:
    """Build one linear layer: logistic regression, or linear regression of numbers."""
    return perceptron((), classes, channels, image_size, activation, signal)
