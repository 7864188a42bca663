"""A small network of convolutions over time."""

from __future__ import annotations

from torch import nn

from bract.config.signal import SignalSchema
from bract.errors import BractError
from bract.models.registry import MODELS, activation_layer

_KERNELS = (7, 5)


@MODELS.register("conv1d")
def conv1d(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    signal: SignalSchema | None = None,
    width: int = 16,
) -> nn.Module:
    """Build two strided convolutions over time, of ``width / 2`` and ``width`` channels, and two
    linear layers; signals are ``(B, channels, length)``, padded so that every value counts.
    """
    del image_size
    if signal is None or signal.layout != "channels-first":
        raise BractError(
            "model conv1d takes signals in the layout channels-first; set data.input to signal, or "
            "another model.name",
            code="input-mismatch",
        )
    length = signal.length
    for _ in _KERNELS:
        length = (length - 1) // 2 + 1
    half = max(1, width // 2)
    return nn.Sequential(
        nn.Conv1d(channels, half, _KERNELS[0], stride=2, padding=_KERNELS[0] // 2),
        activation_layer(activation),
        nn.Conv1d(half, width, _KERNELS[1], stride=2, padding=_KERNELS[1] // 2),
        activation_layer(activation),
        nn.Flatten(),
        nn.Linear(width * length, 32),
        activation_layer(activation),
        nn.Linear(32, classes),
    )
