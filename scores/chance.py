"""How likely an image that was made without the gradient comes as near to a client's original.

The hypothesis is that a reconstruction carries nothing of the client's images beyond their labels:
it may be anything that can be made without the upload, such as another person's image, the mean of
the class, or a sample of the prior. The client's image is then one more draw of its class, and no
nearer to the reconstruction than other images of that class are. docs/measured/method.md has the
derivation, what was measured, and where it does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Array = NDArray[np.float64]

FEWEST = 9
"""Images of a class from which on it is known how near such images come by chance."""

NEAREST = 10
"""Most of the nearest reference images that the tail of near misses is read from."""

_SIDE = 8
"""Pixels to a side at which images are compared: noise averages out, the picture stays."""

_BLURS = (0.0, 1.5 / 32, 3 / 32, 5 / 32)
"""Standard deviations of the blurs that an original may have suffered, as shares of its side."""

_COPY = 1e-6
"""Dissimilarity below which two images count as the same."""

_LEAST_SPREAD = 0.01
"""Least mean step between the nearest in log dissimilarity; identical references have none."""


def views(images: Tensor) -> Array:
    """Return each image as it is and blurred, small and of unit length: ``(blurs, N, values)``.

    Parameters
    ----------
    images
        float32 ``(N, C, H, W)`` in [0, 1].
    """
    from scipy.ndimage import gaussian_filter

    pixels = images.detach().cpu().double().numpy()
    height, width = pixels.shape[-2:]
    sigmas = [(0.0, 0.0, share * height, share * width) for share in _BLURS]
    return np.stack([_small(gaussian_filter(pixels, s) if any(s) else pixels) for s in sigmas])


def _small(pixels: Array) -> Array:
    size = (min(pixels.shape[-2], _SIDE), min(pixels.shape[-1], _SIDE))
    flat = F.adaptive_avg_pool2d(torch.from_numpy(pixels), size).flatten(1).numpy()
    flat = flat - flat.mean(axis=1, keepdims=True)
    found: Array = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)
    return found


def dissimilarity(images: Tensor, originals: Array) -> Array:
    """Return one minus the correlation with the most fitting blur of each original.

    Contrast and brightness do not count, nor does a blur of the reconstruction.

    Parameters
    ----------
    images
        Reconstructions, ``(B, C, H, W)``.
    originals
        `views` of N images.

    Returns
    -------
    Array
        ``(B, N)`` from 0, where the image is a copy, to 2.
    """
    plain = _small(images.detach().cpu().double().numpy())
    found: Array = 1.0 - np.max(plain @ originals.swapaxes(1, 2), axis=0)
    return found


def chance(own: Array, references: Array) -> Array:
    """Bound the probability that one more image of the class comes as near to a reconstruction.

    While a reference is as near, it is a rank, which needs no assumption. Nearer than all of them,
    log dissimilarities are taken to fall off exponentially, as they do where the number of images
    within a radius r grows like a power of r. Then an excess below the k + 1st nearest as large
    beside the sum of the k others' has the probability ``(1 + excess / sum)^-k``, whatever the
    power is.

    Parameters
    ----------
    own
        ``(B,)``: dissimilarity of each reconstruction to its original.
    references
        ``(B, M)``: to M images of the original's class, at least `FEWEST`.

    Returns
    -------
    Array
        ``(B,)`` in (0, 1].
    """
    count = references.shape[1]
    nearest = min(NEAREST, count // 3)
    logs = np.sort(np.log(np.maximum(references, _COPY)), axis=1)
    here = np.log(np.maximum(own, _COPY))
    edge = logs[:, nearest]
    spread = np.maximum((edge[:, None] - logs[:, :nearest]).sum(1), _LEAST_SPREAD * nearest)
    excess = np.maximum(edge - here, 0.0)
    tail = (nearest + 1) / (count + 1) * (1.0 + excess / spread) ** -nearest
    nearer = (logs <= here[:, None]).sum(1)
    rank = (1 + nearer) / (count + 1)
    found: Array = np.where(nearer == 0, np.minimum(rank, tail), rank)
    return found


def chance_of_any(
    own: Array, references: Mapping[int, Array], counts: Mapping[int, int], label: int
) -> Array:
    """Bound the probability that any of a client's originals comes as near to a reconstruction.

    It is the sum of `chance` over the originals, each by the references of its own class (Boole's
    inequality), so the choice of the nearest among them is paid for.

    Parameters
    ----------
    own
        ``(B,)``: dissimilarity of each reconstruction to the original that it was matched to.
    references
        Dissimilarities ``(B, M)`` to the references of a class, by label.
    counts
        How many originals have each label.
    label
        The matched original's; its references replace those of a class without any.
    """
    by_class = {c: chance(own, apart) for c, apart in references.items()}
    total = np.zeros(len(own))
    for c, n in counts.items():
        total += n * by_class.get(c, by_class[label])
    return np.minimum(total, 1.0)
