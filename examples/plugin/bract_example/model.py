"""A model: one hidden layer."""

from __future__ import annotations

from torch import nn

from bract.models import activation_layer


def perceptron(*, classes: int, channels: int, image_size: int, activation: str) -> nn.Module:
    """Return a model from images ``(B, channels, side, side)`` to logits ``(B, classes)``."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * image_size**2, 32),
        activation_layer(activation),
        nn.Linear(32, classes),
    )
