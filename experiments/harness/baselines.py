"""Baselines of images that use no gradient; every table of scores shows them with an attack."""

from __future__ import annotations

import torch
from torch import Tensor


def class_mean(images: Tensor, labels: Tensor, wanted: Tensor) -> Tensor:
    """The mean image of each wanted label, float32 ``(N, C, H, W)``.

    ``images`` ``(M, C, H, W)`` and ``labels`` ``(M,)`` are reference data of the same kind, not
    the attacked images. A label without reference images gets the mean of all.
    """
    overall = images.mean(dim=0)
    rows = []
    for label in wanted.tolist():
        of_class = images[labels == label]
        rows.append(of_class.mean(dim=0) if len(of_class) else overall)
    return torch.stack(rows)


def random_image(images: Tensor, count: int, *, seed: int) -> Tensor:
    """Images drawn from reference data ``(M, C, H, W)``, with replacement, ``(count, C, H, W)``."""
    generator = torch.Generator().manual_seed(seed)
    return images[torch.randint(0, len(images), (count,), generator=generator)]
