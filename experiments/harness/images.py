"""Images that attacks are scored on, and others that settings were chosen on.

`IMAGE_SETS` are offline; others lie in a folder (`experiments.harness.places`).
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
from experiments.harness.places import BY_PATH, FOLDER, open_by_path

SIZE = 32
IMAGE_SETS = ("digits", "mnist", "faces", "grey", "photos")

PHOTOGRAPHS = {
    "score": ("astronaut", "coffee", "chelsea", "rocket"),
    "choose": ("retina", "hubble_deep_field", "immunohistochemistry"),
}
GREY_PICTURES = {
    "score": ("camera", "coins", "page", "moon"),
    "choose": ("brick", "grass", "gravel", "text"),
}

_CROP = 128
_CANDIDATES = 100
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
    """

    images: Tensor
    labels: Tensor
    candidates: Tensor
    candidate_labels: Tensor
    classes: int = 10


def image_set(
    name: str, count: int, split: str, *, size: int = SIZE, folder: Path = FOLDER
) -> ImageSet:
    """Return images of the split ``score`` or ``choose``, which share no original.

    ``digits`` and ``mnist`` (grey) are scored on the last images of the test split and chosen on
    the training split. ``faces`` are 25 pixels of LFW, enlarged. ``grey`` and ``photos`` (colour)
    are crops of 128 pixels, reduced to 32, from pictures that scikit-image ships. Faces and crops
    have no class here: their labels are drawn at random. Every other data set is read from
    ``folder``.

    Raises
    ------
    BractError
        If a data set is unknown, not there, or has fewer images.
    """
    if name == "digits":
        found = _digits(count, split)
    elif name == "mnist" and mnist_package.available():
        found = _mnist(count, split)
    elif name == "faces":
        found = _faces(count, split)
    elif name in ("grey", "photos"):
        return _crops((GREY_PICTURES if name == "grey" else PHOTOGRAPHS)[split], count, size)
    elif name in BY_PATH:
        return _by_path(name, count, split, size, folder)
    else:
        raise BractError(
            f"unknown images {name!r}; expected one of {', '.join((*IMAGE_SETS, *BY_PATH))}"
        )
    if len(found.images) < count:
        raise BractError(f"{name} has {len(found.images)} images to attack, {count} are needed")
    return (
        found
        if size == SIZE
        else replace(
            found,
            images=_resized(found.images, size),
            candidates=_resized(found.candidates, size),
        )
    )


def _by_path(name: str, count: int, split: str, size: int, folder: Path) -> ImageSet:
    source = open_by_path(name, folder, "test" if split == "score" else "train")
    if len(source.labels) < count + _CANDIDATES:
        raise BractError(
            f"{name} in {folder} has {len(source.labels)} images, {count + _CANDIDATES} are needed"
        )
    found = _last(
        count,
        source.labels,
        lambda kept: source.images(kept, channels=source.channels, size=size),
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
    raise BractError(f"{name} has no classes to train on; expected digits or mnist")


def held_out_images(name: str) -> tuple[Tensor, Tensor]:
    """Return labelled images to judge a trained network on; shapes as `training_images`."""
    if name == "digits":
        source = open_source(DataConfig(name="digits"), "test")
        return source.images(range(len(source.labels)), channels=1, size=SIZE), source.labels
    images, labels = mnist_package.read("test")
    return _resized(images[:2_000]), labels[:2_000]


def _digits(count: int, split: str) -> ImageSet:
    source = open_source(DataConfig(name="digits"), "test" if split == "score" else "train")
    return _last(count, source.labels, lambda kept: source.images(kept, channels=1, size=SIZE))


def _mnist(count: int, split: str) -> ImageSet:
    images, labels = mnist_package.read("test" if split == "score" else "train")
    return _last(count, labels, lambda kept: _resized(images[kept]))


def _last(count: int, labels: Tensor, images: Callable[[Sequence[int]], Tensor]) -> ImageSet:
    total = len(labels)
    chosen = list(range(total - count, total))
    rest = list(range(total - count - _CANDIDATES, total - count))
    return ImageSet(images(chosen), labels[chosen], images(rest), labels[rest])


def _faces(count: int, split: str) -> ImageSet:
    import skimage.data

    faces = _resized(
        torch.from_numpy(skimage.data.lfw_subset()[:_FACES].astype(np.float32))[:, None]
    )
    kept = faces[_FACES // 4 :] if split == "score" else faces[: _FACES // 4]
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(10, (len(kept),), generator=generator)
    return ImageSet(kept[:count], labels[:count], kept[count:], labels[count:])


def _resized(images: Tensor, size: int = SIZE) -> Tensor:
    """Return images ``(N, C, H, W)`` at ``size`` pixels, as the data module resizes."""
    return F.interpolate(
        images, size=(size, size), mode="bilinear", antialias=True, align_corners=False
    ).clamp(0.0, 1.0)


@cache
def _picture(name: str) -> Tensor:
    import skimage.data

    pixels = torch.from_numpy(getattr(skimage.data, name)()).float() / 255
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


def _crops(names: Sequence[str], count: int, size: int) -> ImageSet:
    pictures = [_picture(name) for name in names]
    generator = torch.Generator().manual_seed(7)

    def draw(number: int) -> Tensor:
        crops = []
        for index in range(number):
            picture = pictures[index % len(pictures)]
            top, left = (
                int(torch.randint(0, side - _CROP, (1,), generator=generator))
                for side in picture.shape[1:]
            )
            crop = picture[None, :, top : top + _CROP, left : left + _CROP]
            crops.append(F.interpolate(crop, size=(size, size), mode="area")[0])
        return torch.stack(crops)

    images, candidates = draw(count), draw(_CANDIDATES)
    return ImageSet(
        images=images,
        labels=torch.randint(10, (count,), generator=generator),
        candidates=candidates,
        candidate_labels=torch.randint(10, (_CANDIDATES,), generator=generator),
    )
