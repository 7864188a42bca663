"""Test images, which nobody trained on: what guesses are made of and originals are told from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.data import Source, data_spec, open_source
from bract.seeds import derive_seed

CANDIDATES = 99
"""Images among which an original must be retrieved, beside itself."""

PER_CLASS = 100
"""Most images behind the mean of a class."""


@dataclass
class Reference:
    """The test split, of which only the images that are drawn are decoded.

    Data sets lie sorted by class in many folders, so everything is drawn at random under a seed.

    Parameters
    ----------
    data
        Whose test split.
    seed
        The audit's.
    """

    data: DataConfig
    seed: int
    _means: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def candidates(self) -> Tensor:
        """The images among which originals are looked for, ``(CANDIDATES, C, H, W)``."""
        return self._decode(self._order[:CANDIDATES])

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean image of each wanted label ``(N,)``, as ``(N, C, H, W)``.

        A label without test images gets the mean of the candidates.
        """
        return torch.stack([self._mean(int(label)) for label in wanted])

    def random_image(self, count: int, *, seed: int) -> Tensor:
        """Return images drawn with replacement, ``(count, C, H, W)``."""
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(0, len(self._source.labels), (count,), generator=generator)
        return self._decode(picks)

    def _mean(self, label: int) -> Tensor:
        if label not in self._means:
            mine = self._order[self._source.labels[self._order] == label][:PER_CLASS]
            images = self._decode(mine) if len(mine) else self.candidates
            self._means[label] = images.mean(dim=0)
        return self._means[label]

    @cached_property
    def _source(self) -> Source:
        return open_source(self.data, "test")

    @cached_property
    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "reference"))
        return torch.randperm(len(self._source.labels), generator=generator)

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        return data_spec(self.data).image_shape

    def _decode(self, indices: Tensor) -> Tensor:
        channels, size, _ = self._shape
        return self._source.images(indices.tolist(), channels=channels, size=size)
