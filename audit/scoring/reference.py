"""Images without the gradient: what baselines are made of and originals are told from.

They are test images, which nobody trained on. Of an app whose test data nobody named they are the
images that other clients kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bract.audit.scoring.chance import Array, views
from bract.config import DataConfig
from bract.data import Source, data_spec, open_source
from bract.seeds import derive_seed

CANDIDATES = 99
"""Images among which an original must be retrieved, beside itself."""

PER_CLASS = 100
"""Most images of a class that its mean, and what is near by chance, are taken from."""


MOST_KEPT = 5000
"""Most kept images that are held in memory as references."""


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
    _views: dict[int, Array] = field(default_factory=dict, repr=False)

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

    def of_class(self, label: int) -> Array:
        """Return the `views` of up to `PER_CLASS` images with this label, ``(blurs, M, ...)``."""
        self._mean(label)
        return self._views[label]

    def _mean(self, label: int) -> Tensor:
        if label not in self._means:
            mine = self._order[self._source.labels[self._order] == label][:PER_CLASS]
            images = self._decode(mine) if len(mine) else self.candidates
            self._means[label] = images.mean(dim=0)
            self._views[label] = views(images)[:, : len(mine)]
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


class KeptReference(Reference):
    """Images that clients kept, without those of one client's update.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, N >= 1.
    seed
        The audit's.
    """

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        super().__init__(DataConfig(), seed)
        self._images, self._labels = images, labels

    @cached_property
    def _source(self) -> Source:
        return Source(
            labels=self._labels,
            classes=int(self._labels.max()) + 1,
            channels=self._images.shape[1],
            read=lambda i: self._images[i],
        )

    def _decode(self, indices: Tensor) -> Tensor:
        return self._images[indices]


@dataclass
class KeptImages:
    """All images that the clients of an app kept, each once.

    Parameters
    ----------
    truths
        Images and labels of every update whose client kept them; those of another shape than the
        first are left out.
    """

    truths: Iterable[tuple[Tensor, Tensor]]
    seed: int

    @cached_property
    def _pool(self) -> dict[bytes, tuple[Tensor, Tensor]]:
        pool: dict[bytes, tuple[Tensor, Tensor]] = {}
        shape: torch.Size | None = None
        for images, labels in self.truths:
            shape = shape or images.shape[1:]
            if images.shape[1:] != shape:
                continue
            for image, label in zip(images, labels, strict=True):
                if len(pool) < MOST_KEPT:
                    pool.setdefault(image.numpy().tobytes(), (image, label))
        return pool

    def without(self, images: Tensor) -> KeptReference | None:
        """Return all of them but these ``(N, C, H, W)``; None where nothing is left."""
        own = {image.numpy().tobytes() for image in images}
        left = [pair for key, pair in self._pool.items() if key not in own]
        if not left:
            return None
        return KeptReference(
            torch.stack([image for image, _ in left]),
            torch.stack([label for _, label in left]),
            self.seed,
        )
