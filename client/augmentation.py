"""A client's changes to its images before it trains on them, drawn anew at every use.

An augmentation is no defense: inverting the update gives the augmented image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.config.sections import Augmentation
from bract.crypto.randomness import SecretStream, Source, uniform_from

__all__ = ["AUGMENTATIONS", "PADDING", "augment"]

PADDING = 4
"""Pixels that ``random-crop`` adds at every side, as usual for CIFAR (He et al. 2016, 4.2)."""


def _flipped(images: Tensor, axis: int, source: Source) -> Tensor:
    chosen = uniform_from(source, (len(images),), 0.0, 1.0) < 0.5
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(axis), images)


def _horizontal_flip(images: Tensor, source: Source) -> Tensor:
    return _flipped(images, -1, source)


def _vertical_flip(images: Tensor, source: Source) -> Tensor:
    return _flipped(images, -2, source)


def _corners(count: int, source: Source) -> Tensor:
    places = 2 * PADDING + 1
    if isinstance(source, SecretStream):
        # Of 2^53 equally probable numbers, each place gets as many as the next, but for one.
        return source.uniform((count, 2), 0.0, places, torch.float64).long()
    return torch.randint(places, (count, 2), generator=source)


def _random_crop(images: Tensor, source: Source) -> Tensor:
    height, width = images.shape[-2:]
    padded = F.pad(images, (PADDING,) * 4)
    corners = _corners(len(images), source).tolist()
    cropped = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(padded, corners, strict=True)
    ]
    return torch.stack(cropped)


AUGMENTATIONS: dict[Augmentation, Callable[[Tensor, Source], Tensor]] = {
    "horizontal-flip": _horizontal_flip,
    "vertical-flip": _vertical_flip,
    "random-crop": _random_crop,
}
"""``horizontal-flip`` and ``vertical-flip`` mirror an image with probability 1/2; ``random-crop``
cuts its own size out of it at random after `PADDING` black pixels were added at every side."""


def augment(images: Tensor, names: Sequence[Augmentation], source: Source) -> Tensor:
    """Return images as a client trains on them once; each is drawn for on its own.

    Parameters
    ----------
    images
        float32 ``(B, C, H, W)`` in [0, 1] on the CPU, B >= 1; it stays as it is.
    names
        The augmentations, in order.
    source
        A generator, or under a privacy claim a secret stream of one example and step.
    """
    for name in names:
        images = AUGMENTATIONS[name](images, source)
    return images
