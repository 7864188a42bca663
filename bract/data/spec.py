"""The declared shape and normalisation of what a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import TextSchema


@dataclass(frozen=True)
class DataSpec:
    """The declared shape and normalisation of the inputs.

    Attributes
    ----------
    image_shape
        ``(C, H, W)``; of an encoded row ``(features, 1, 1)``, of a text ``(length, 1, 1)``,
        of a signal ``(channels, 1, length)``.
    classes
        Number of classes; outputs of the model where it predicts numbers.
    mean, std
        Per channel; the model sees ``(x - mean) / std`` for x in [0, 1].
    table
        Schema of the rows; None for other inputs.
    text
        Schema of the texts; None for other inputs.
    signal
        Schema of the signals; None for other inputs.
    """

    image_shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    table: TableSchema | None = None
    text: TextSchema | None = None
    signal: SignalSchema | None = None

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas by the names that `bract.models.create_model` takes them by."""
        return {"table": self.table, "text": self.text, "signal": self.signal}

    @property
    def loss(self) -> str:
        """Name of the clients' loss, of `bract.models.losses`."""
        schema = self.text or self.signal or self.table
        return "cross_entropy" if schema is None else schema.objective

    def normalise(self, images: Tensor) -> Tensor:
        """Map pixels ``(B, C, H, W)`` in [0, 1] to model inputs."""
        return (images - self._column(self.mean, images)) / self._column(self.std, images)

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Map model inputs back to pixels, without clipping."""
        return inputs * self._column(self.std, inputs) + self._column(self.mean, inputs)

    @staticmethod
    def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, device=like.device, dtype=like.dtype).view(1, -1, 1, 1)
