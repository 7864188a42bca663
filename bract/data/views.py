"""Each party's view of the data: its shape, one client's part, the server's test split."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bract.config import DataConfig, FederationConfig
from bract.data.partition import partition_indices
from bract.data.sources import DATASETS, Source, open_source
from bract.data.spec import DataSpec
from bract.errors import BractError

__all__ = ["ClientData", "DataSpec", "client_data", "data_spec", "test_data", "training_examples"]


@dataclass(frozen=True)
class ClientData:
    """One client's part: images float32 ``(N, C, H, W)`` in [0, 1], labels int64 ``(N,)``.

    Rows are ``(features, 1, 1)``; targets that are numbers are float32. The last
    ``canaries`` of the images are none of its data.
    """

    images: Tensor
    labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    canaries: int = 0


def data_spec(config: DataConfig) -> DataSpec:
    """Return shape and normalisation; opens the data only where the number of classes needs it."""
    return DATASETS[config.name].spec(config)


def client_data(config: FederationConfig, client: int) -> ClientData:
    """Decode the examples of one client (from 0), its validation share set apart."""
    source = open_source(config.data, "train")
    spec = data_spec(config.data)
    indices, held_out = _indices(source, config, client)
    channels, size, _ = spec.image_shape

    def decode(part: list[int]) -> tuple[Tensor, Tensor]:
        return source.images(part, channels=channels, size=size), source.labels[part]

    images, labels = decode(indices[held_out:])
    validation_images, validation_labels = decode(indices[:held_out])
    return ClientData(images, labels, validation_images, validation_labels)


def training_examples(config: FederationConfig, client: int) -> int:
    """Return how many examples `client_data` gives one client to train on; none is decoded."""
    indices, held_out = _indices(open_source(config.data, "train"), config, client)
    return len(indices) - held_out


def _indices(source: Source, config: FederationConfig, client: int) -> tuple[list[int], int]:
    """Return which examples are one client's, and how many of them, the first, are held out."""
    indices = partition_indices(
        source.labels,
        config.data.partition,
        clients=config.clients,
        client=client,
        seed=config.seed,
    )
    if len(indices) == 0:
        raise BractError(
            f"data.partition gives client {client} no examples; "
            "raise alpha or min_examples, or lower clients",
            code="data-partition",
        )
    return indices, int(len(indices) * config.data.validation)


def test_data(config: DataConfig) -> tuple[Tensor, Tensor]:
    """Decode the test split: images ``(N, C, H, W)`` in [0, 1] and labels int64 ``(N,)``."""
    source = open_source(config, "test")
    channels, size, _ = data_spec(config).image_shape
    indices = list(range(len(source.labels)))
    return source.images(indices, channels=channels, size=size), source.labels
