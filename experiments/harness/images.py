"""Images that attacks are scored on, and others that settings were chosen on.

`IMAGE_SETS` are offline; others lie in a folder (`experiments.harness.data_folders`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bract.config import DataConfig
from bract.data.sources import open_source
from bract.errors import BractError
from experiments.harness import mnist_package
from experiments.harness.data_folders import BY_PATH, FOLDER, open_by_path
from experiments.harness.splits import Kind, kind_of

SIZE = 32
IMAGE_SETS = ("digits", "mnist", "faces", "grey", "photos")

PHOTOGRAPHS: dict[Kind, tuple[str, ...]] = {
    "score": ("astronaut", "coffee", "chelsea", "rocket"),
    "choose": ("retina", "hubble_deep_field", "immunohistochemistry"),
    "release": ("stereo_motorcycle",),
}
GREY_PICTURES: dict[Kind, tuple[str, ...]] = {
    "score": ("camera", "coins", "page", "moon"),
    "choose": ("brick", "grass", "gravel", "text"),
    "release": ("clock", "cell"),
}

_CROP = 128
_CANDIDATES = 100
_REFERENCES = 300
_FACES = 100
"""The first images of scikit-image's subset of LFW show faces, the others do not."""


@dataclass(frozen=True)
class ImageSet:
    """Images to attack and others of their kind.

    Attributes
    ----------
    images, labels
        float32 ``(N, C, size, size)`` in [0, 1] and int64 ``(N,)``.
    candidates, candidate_labels
        Images that are not attacked: the pool for identifiability and the no-gradient baselines.
    classes
        Number of classes.
    sources
        What each image was taken from: crops of one picture share a number, every other image has
        its own.
    references, reference_labels
        Images of the leak rule: the candidates, and more where there are some.
    """

    images: Tensor
    labels: Tensor
    candidates: Tensor
    candidate_labels: Tensor
    classes: int = 10
    sources: tuple[int, ...] = ()
    references: Tensor | None = None
    reference_labels: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            object.__setattr__(self, "sources", tuple(range(len(self.images))))
        if self.references is None or self.reference_labels is None:
            object.__setattr__(self, "references", self.candidates)
            object.__setattr__(self, "reference_labels", self.candidate_labels)


def image_set(
    name: str, count: int, split: str, *, size: int = SIZE, folder: Path = FOLDER
) -> ImageSet:
    """Return images of a split (`experiments.harness.splits`); splits share no original.

    ``digits`` and ``mnist`` (grey) are scored on the last images of the test split, at a release on
    the first, and chosen on the training split. ``faces`` are 25 pixels of LFW, enlarged. ``grey``
    and ``photos`` (colour) are crops of 128 pixels, reduced to 32, from pictures that scikit-image
    ships. Faces and crops have no class here: their labels are drawn at random. Every other data
    set is read from ``folder``.

    Raises
    ------
    BractError
        If a data set is unknown, not there, or has fewer images.
    """
    kind = kind_of(split)
    if name == "digits":
        found = _digits(count, kind)
    elif name == "mnist" and mnist_package.available():
        found = _mnist(count, kind)
    elif name == "faces":
        found = _faces(count, kind)
    elif name in ("grey", "photos"):
        return _crops((GREY_PICTURES if name == "grey" else PHOTOGRAPHS)[kind], count, size)
    elif name in BY_PATH:
        return _by_path(name, count, kind, size, folder)
    else:
        raise BractError(
            f"unknown images {name!r}; expected one of {', '.join((*IMAGE_SETS, *BY_PATH))}",
            code="unknown-name",
        )
    if len(found.images) < count:
        raise BractError(
            f"{name} has {len(found.images)} images to attack, {count} are needed",
            code="data-empty",
        )
    return (
        found
        if size == SIZE
        else replace(
            found,
            images=_resized(found.images, size),
            candidates=_resized(found.candidates, size),
            references=None if found.references is None else _resized(found.references, size),
        )
    )


def _by_path(name: str, count: int, kind: Kind, size: int, folder: Path) -> ImageSet:
    source = open_by_path(name, folder, "train" if kind == "choose" else "test")
    if len(source.labels) < count + _CANDIDATES:
        raise BractError(
            f"{name} in {folder} has {len(source.labels)} images, {count + _CANDIDATES} are needed",
            code="data-empty",
        )
    found = _taken(
        count,
        source.labels,
        lambda kept: source.images(kept, channels=source.channels, size=size),
        kind,
    )
    return replace(found, classes=source.classes)


def all_images(name: str, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Return the grey images and labels of a data set, training split first; shapes as there."""
    sources = [open_source(DataConfig(name=name), split) for split in ("train", "test")]
    images = [s.images(range(len(s.labels)), channels=1, size=size) for s in sources]
    return torch.cat(images), torch.cat([s.labels for s in sources])


def training_images(name: str) -> tuple[Tensor, Tensor]:
    """Return labelled images to train a network on, none of which is scored.

    Returns
    -------
    tuple of Tensor
        float32 ``(N, 1, 32, 32)`` and int64 ``(N,)``.
    """
    if name == "digits":
        source = open_source(DataConfig(name="digits"), "train")
        return source.images(range(len(source.labels)), channels=1, size=SIZE), source.labels
    if name == "mnist":
        images, labels = mnist_package.read("train")
        return _resized(images[:10_000]), labels[:10_000]
    raise BractError(
        f"{name} has no classes to train on; expected digits or mnist", code="data-empty"
    )


def public_photographs(count: int) -> Tensor:
    """Return crops of photographs that share no picture with those that are scored or released.

    Crops as `image_set` cuts ``photos``: of the pictures on which settings are chosen, and of
    the two that scikit-learn ships.

    Returns
    -------
    Tensor
        float32 ``(count, 3, 32, 32)`` in [0, 1].
    """
    from sklearn.datasets import load_sample_image

    shipped = [
        torch.from_numpy(load_sample_image(f"{name}.jpg").copy()).permute(2, 0, 1).float() / 255
        for name in ("china", "flower")
    ]
    pictures = [*shipped, *(picture(name) for name in PHOTOGRAPHS["choose"])]
    return _drawn(pictures, count, SIZE, torch.Generator().manual_seed(11))


def held_out_images(name: str) -> tuple[Tensor, Tensor]:
    """Return labelled images to judge a trained network on; shapes as `training_images`."""
    if name == "digits":
        source = open_source(DataConfig(name="digits"), "test")
        return source.images(range(len(source.labels)), channels=1, size=SIZE), source.labels
    images, labels = mnist_package.read("test")
    return _resized(images[:2_000]), labels[:2_000]


def _digits(count: int, kind: Kind) -> ImageSet:
    source = open_source(DataConfig(name="digits"), "train" if kind == "choose" else "test")
    return _taken(
        count, source.labels, lambda kept: source.images(kept, channels=1, size=SIZE), kind
    )


def _mnist(count: int, kind: Kind) -> ImageSet:
    images, labels = mnist_package.read("train" if kind == "choose" else "test")
    return _taken(count, labels, lambda kept: _resized(images[kept]), kind)


def _taken(
    count: int, labels: Tensor, images: Callable[[Sequence[int]], Tensor], kind: Kind
) -> ImageSet:
    """Take the last images and, as candidates, those before them; at a release the first ones."""
    order = list(range(len(labels)))
    if kind == "release":
        order.reverse()
    chosen, rest = order[-count:], order[-count - _CANDIDATES : -count]
    more = order[max(0, len(order) - count - _REFERENCES) : -count]
    return ImageSet(
        images(chosen),
        labels[chosen],
        images(rest),
        labels[rest],
        references=images(more),
        reference_labels=labels[more],
    )


def _faces(count: int, kind: Kind) -> ImageSet:
    import skimage.data

    faces = _resized(
        torch.from_numpy(skimage.data.lfw_subset()[:_FACES].astype(np.float32))[:, None]
    )
    kept = faces[: _FACES // 4] if kind == "choose" else faces[_FACES // 4 :]
    if kind == "release":
        kept = kept.flip(0)
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(10, (len(kept),), generator=generator)
    return ImageSet(kept[:count], labels[:count], kept[count:], labels[count:])


def _resized(images: Tensor, size: int = SIZE) -> Tensor:
    """Return images ``(N, C, H, W)`` at ``size`` pixels, as the data module resizes."""
    return F.interpolate(
        images, size=(size, size), mode="bilinear", antialias=True, align_corners=False
    ).clamp(0.0, 1.0)


@cache
def picture(name: str) -> Tensor:
    """Return a picture that scikit-image ships, float32 ``(C, H, W)`` in [0, 1]."""
    import skimage.data

    found = getattr(skimage.data, name)()
    if isinstance(found, tuple):  # a stereo pair with its disparities
        found = found[0]
    pixels = torch.from_numpy(found).float() / 255
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


def _crops(names: Sequence[str], count: int, size: int) -> ImageSet:
    pictures = [picture(name) for name in names]
    generator = torch.Generator().manual_seed(7)

    images, candidates = (_drawn(pictures, n, size, generator) for n in (count, _CANDIDATES))
    return ImageSet(
        images=images,
        labels=torch.randint(10, (count,), generator=generator),
        candidates=candidates,
        candidate_labels=torch.randint(10, (_CANDIDATES,), generator=generator),
        sources=tuple(index % len(pictures) for index in range(count)),
    )


def _drawn(pictures: Sequence[Tensor], count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return crops of the pictures in turn, ``(count, C, size, size)``."""
    crops = []
    for index in range(count):
        whole = pictures[index % len(pictures)]
        top, left = (
            int(torch.randint(0, side - _CROP, (1,), generator=generator))
            for side in whole.shape[1:]
        )
        crop = whole[None, :, top : top + _CROP, left : left + _CROP]
        crops.append(F.interpolate(crop, size=(size, size), mode="area")[0])
    return torch.stack(crops)
