"""Each party's view of the data: its shape, one client's part, the server's test split."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.config import DataConfig, FederationConfig
from bract.config.config import IidPartition
from bract.data.partition import partition_indices
from bract.data.sources import DATASETS, Source, open_source
from bract.data.spec import DataSpec
from bract.errors import BractError

__all__ = [
    "ClientData",
    "DataSpec",
    "client_data",
    "data_spec",
    "known_spec",
    "own_test_data",
    "test_data",
    "training_examples",
]


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


def known_spec(config: DataConfig) -> DataSpec | None:
    """Return `data_spec` where no file of a site is read for it; None elsewhere."""
    return DATASETS[config.name].known_spec(config)


def client_data(config: FederationConfig, client: int, secret: bytes | None = None) -> ClientData:
    """Decode the examples of one client (from 0), its validation share set apart.

    Parameters
    ----------
    secret
        Assigns each example by a hash of its own content, under this key: to the validation share,
        and, of a file whose splits are its rows, to the test split. Then no example decides where
        another one goes, and equal examples go together. None draws the validation share from
        ``config.seed`` over all examples.
    """
    if secret is not None:
        images, labels, sides = _assigned(config, client, secret)
        trained, held_out = sides == _TRAIN, sides == _VALIDATION
        if not bool(trained.any()):
            raise BractError(
                f"{len(labels)} examples leave none to train on once those for validation and test "
                "are taken out; lower data.validation, or use more data",
                code="data-empty",
            )
        return ClientData(images[trained], labels[trained], images[held_out], labels[held_out])
    source = open_source(config.data, "train")
    indices, first = _indices(source, config, client)
    images, labels = _decoded(source, config.data, indices[first:])
    return ClientData(images, labels, *_decoded(source, config.data, indices[:first]))


def training_examples(config: FederationConfig, client: int, secret: bytes | None = None) -> int:
    """Return how many examples `client_data` gives one client to train on.

    None is decoded for it, unless a ``secret`` assigns them by their content.
    """
    if secret is not None:
        return len(client_data(config, client, secret).labels)
    indices, held_out = _indices(open_source(config.data, "train"), config, client)
    return len(indices) - held_out


_TRAIN, _VALIDATION, _TEST = range(3)

_TEST_SHARE = 0.2
"""Of a file whose splits are its rows; `bract.data.tables` takes every fifth one."""


def _assigned(
    config: FederationConfig, client: int, secret: bytes
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all examples of one client, and the side that the content of each one gives it."""
    data = config.data
    source = open_source(data, "train")
    whole = config.clients == 1 and isinstance(data.partition, IidPartition)
    indices = list(range(len(source.labels))) if whole else _indices(source, config, client)[0]
    parts = [_decoded(source, data, indices)]
    split = whole and DATASETS[data.name].splits_rows(data)
    if split:
        rest = open_source(data, "test")
        parts.append(_decoded(rest, data, list(range(len(rest.labels)))))
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    sides = [
        _side(secret, image, label, test=_TEST_SHARE if split else 0.0, validation=data.validation)
        for image, label in zip(images, labels, strict=True)
    ]
    return images, labels, torch.tensor(sides)


def _side(secret: bytes, image: Tensor, label: Tensor, *, test: float, validation: float) -> int:
    content = hashlib.blake2b(key=secret, digest_size=16)
    for value in (image, label):
        content.update(value.contiguous().numpy().tobytes())
    found = content.digest()
    first, second = (int.from_bytes(part, "big") / 2**64 for part in (found[:8], found[8:]))
    if first < test:
        return _TEST
    return _VALIDATION if second < validation else _TRAIN


def _decoded(source: Source, config: DataConfig, indices: list[int]) -> tuple[Tensor, Tensor]:
    channels, size, _ = data_spec(config).image_shape
    return source.images(indices, channels=channels, size=size), source.labels[indices]


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
    return _decoded(source, config, list(range(len(source.labels))))


def own_test_data(config: FederationConfig, secret: bytes | None) -> tuple[Tensor, Tensor]:
    """Decode the test split of a site's data, whose `client_data` a ``secret`` assigns."""
    if secret is None or not DATASETS[config.data.name].splits_rows(config.data):
        return test_data(config.data)
    images, labels, sides = _assigned(config, 0, secret)
    return images[sides == _TEST], labels[sides == _TEST]
