"""Each party's view of the data: its shape, one client's part, the server's test split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.config import DataConfig, FederationConfig
from bract.data.partition import partition_indices
from bract.data.sources import DATASETS, open_source
from bract.errors import BractError


@dataclass(frozen=True)
class DataSpec:
    """The declared shape and normalisation of the inputs.

    Attributes
    ----------
    image_shape
        ``(C, H, W)``.
    classes
        Number of classes.
    mean, std
        Per channel; the model sees ``(x - mean) / std`` for pixels x in [0, 1].
    """

    image_shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """Map pixels ``(B, C, H, W)`` in [0, 1] to model inputs."""
        return (images - self._column(self.mean, images)) / self._column(self.std, images)

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Map model inputs back to pixels, without clipping."""
        return inputs * self._column(self.std, inputs) + self._column(self.mean, inputs)

    @staticmethod
    def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, device=like.device, dtype=like.dtype).view(1, -1, 1, 1)


@dataclass(frozen=True)
class ClientData:
    """One client's part: images float32 ``(N, C, H, W)`` in [0, 1], labels int64 ``(N,)``."""

    images: Tensor
    labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor


def data_spec(config: DataConfig) -> DataSpec:
    """Return shape and normalisation; opens the data only where the number of classes needs it."""
    dataset = DATASETS[config.name]
    channels = config.channels or dataset.channels
    classes = dataset.classes or open_source(config, "train").classes
    if config.normalisation == "none":
        mean, std = (0.0,) * channels, (1.0,) * channels
    else:
        mean, std = _to_channels(dataset.mean, channels), _to_channels(dataset.std, channels)
    return DataSpec((channels, config.image_size, config.image_size), classes, mean, std)


def client_data(config: FederationConfig, client: int) -> ClientData:
    """Decode the examples of one client (from 0), its validation share set apart."""
    source = open_source(config.data, "train")
    spec = data_spec(config.data)
    indices = partition_indices(
        source.labels,
        config.data.partition,
        clients=config.clients,
        client=client,
        seed=config.seed,
    )
    held_out = int(len(indices) * config.data.validation)
    if len(indices) == 0:
        raise BractError(
            f"data.partition gives client {client} no examples; "
            "raise alpha or min_examples, or lower clients"
        )
    channels, size, _ = spec.image_shape

    def decode(part: list[int]) -> tuple[Tensor, Tensor]:
        return source.images(part, channels=channels, size=size), source.labels[part]

    images, labels = decode(indices[held_out:])
    validation_images, validation_labels = decode(indices[:held_out])
    return ClientData(images, labels, validation_images, validation_labels)


def test_data(config: DataConfig) -> tuple[Tensor, Tensor]:
    """Decode the test split: images ``(N, C, H, W)`` in [0, 1] and labels int64 ``(N,)``."""
    source = open_source(config, "test")
    channels, size, _ = data_spec(config).image_shape
    indices = list(range(len(source.labels)))
    return source.images(indices, channels=channels, size=size), source.labels


def _to_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return values
    return values * 3 if channels == 3 else (sum(values) / len(values),)
