"""Metrics of reconstructions: image scores, matching, identifiability, intervals of means.

Images are float32 ``(N, C, H, W)`` in [0, 1] throughout. Pair reconstructions of a batch with
their originals by `match` before scoring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bract.errors import BractError
from bract.schema import EXACT_DB

_DRAWS = 10_000
"""Weights behind `share_interval`: its ends move by about 0.003 from one set to another."""


def mse(images: Tensor, originals: Tensor) -> Tensor:
    """Mean squared error of each image, float64 ``(N,)``."""
    _same_shape(images, originals)
    difference = images.to(torch.float64) - originals.to(torch.float64)
    return difference.square().flatten(1).mean(dim=1)


def psnr(images: Tensor, originals: Tensor) -> Tensor:
    """Peak signal-to-noise ratio ``10 log10(1 / MSE)`` in dB, float64 ``(N,)``.

    Capped at `EXACT_DB`, so that one exact copy does not make a mean infinite. Black against
    white scores 0 dB.
    """
    return -10.0 * torch.log10(mse(images, originals).clamp_min(10 ** (-EXACT_DB / 10)))


def at_cap(values: Sequence[float]) -> int:
    """Count the PSNR that are exact copies: `EXACT_DB` stands for any error too small to see."""
    return sum(value >= EXACT_DB - 1e-9 for value in values)


def ssim(images: Tensor, originals: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) by scikit-image, float64 ``(N,)`` in [-1, 1].

    Uniform 7x7 windows, data range 1; images with a side under 7 pixels use the largest odd
    window that fits.

    Raises
    ------
    BractError
        If a side is under 3 pixels.
    """
    from skimage.metrics import structural_similarity

    _same_shape(images, originals)
    side = min(images.shape[-2:])
    window = min(7, side if side % 2 else side - 1)
    if window < 3:
        raise BractError(f"SSIM needs images of at least 3x3 pixels, found {side}")
    scores = [
        structural_similarity(
            original.double().cpu().numpy(),
            image.double().cpu().numpy(),
            data_range=1.0,
            channel_axis=0,
            win_size=window,
        )
        for image, original in zip(images, originals, strict=True)
    ]
    return torch.tensor(scores, dtype=torch.float64)


def match(images: Tensor, originals: Tensor) -> Tensor:
    """Assign reconstructions to originals so that the total squared error is least (Hungarian).

    Returns
    -------
    Tensor
        int64 ``(N,)`` for N originals: ``images[match(images, originals)]`` stands beside
        ``originals``. Equal images may be assigned either way.

    Raises
    ------
    BractError
        If there are fewer reconstructions than originals; pass the originals to be explained.
    """
    from scipy.optimize import linear_sum_assignment

    if len(images) < len(originals):
        raise BractError(
            f"{len(images)} reconstructions cannot be matched to {len(originals)} originals one "
            "to one; match the originals to the reconstructions instead"
        )
    cost = _pairwise_mse(originals, images)
    rows, columns = linear_sum_assignment(cost.numpy())
    order = np.empty(len(originals), dtype=np.int64)
    order[rows] = columns
    return torch.from_numpy(order)


def label_accuracy(recovered: Tensor, labels: Tensor) -> float:
    """Share of true labels that were recovered, as multisets: the order of a batch is arbitrary."""
    size = int(max(recovered.max(), labels.max())) + 1
    found = torch.bincount(recovered.cpu(), minlength=size)
    wanted = torch.bincount(labels.cpu(), minlength=size)
    return float(torch.minimum(found, wanted).sum()) / len(labels)


def identifiability(images: Tensor, originals: Tensor, candidates: Tensor) -> Tensor:
    """Rank of each original when candidates are sorted by distance to its reconstruction.

    Parameters
    ----------
    candidates
        ``(M, C, H, W)``, other images of the same kind, without the originals.

    Returns
    -------
    Tensor
        int64 ``(N,)`` from 1: rank 1 is top-1 retrieval, rank 5 or better top-5. Among M
        candidates chance gives rank 1 with probability 1 / (M + 1). Ties count against the
        attacker.
    """
    _same_shape(images, originals)
    own = _pairwise_mse(images, originals).diagonal()
    others = _pairwise_mse(images, candidates)
    return 1 + (others <= own[:, None]).sum(dim=1)


def mean_interval(
    values: Sequence[float],
    *,
    groups: Sequence[object] | None = None,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
) -> tuple[float, float] | None:
    """Student's t interval of a mean, over groups.

    The mean is over all values. Its standard error is the jackknife's that leaves out one group at
    a time, and its degrees of freedom are Kish's effective number of groups less one, but at least
    one: ``s / sqrt(k)`` and k - 1 where all k groups are of one size. docs/method.md has what it
    covers by simulation: the level where values are near normal, less where few groups are drawn
    from a very skewed distribution.

    Parameters
    ----------
    values
        At least one, finite.
    groups
        One key a value, of what was drawn independently: the client. Values with one key do not
        count as further evidence. None takes every value for independent.
    level
        Coverage, in (0, 1).
    bounds
        What the mean cannot leave; the interval is cut to it.

    Returns
    -------
    tuple or None
        None for a single group, and where all groups have the same mean: neither shows a spread.

    Raises
    ------
    BractError
        If there are no values.
    """
    sums, sizes = _clusters(values, groups)
    count = len(sums)
    if count < 2:
        return None
    mean = float(sums.sum() / sizes.sum())
    without = (sums.sum() - sums) / (sizes.sum() - sizes)
    error = math.sqrt((count - 1) / count * float(np.square(without - without.mean()).sum()))
    effective = float(sizes.sum()) ** 2 / float(np.square(sizes).sum())
    half = _student(level, max(1.0, effective - 1.0)) * error
    if half <= 1e-9 * max(1.0, float(np.abs(sums / sizes).max())):
        return None
    low, high = mean - half, mean + half
    return (low, high) if bounds is None else (max(low, bounds[0]), min(high, bounds[1]))


def share_interval(
    values: Sequence[float], *, groups: Sequence[object] | None = None, level: float = 0.95
) -> tuple[float, float] | None:
    """Interval of a mean of values in [0, 1], which needs no spread to be seen.

    Gaffke's bounds (2005): the quantiles of the mean under weights drawn uniformly from the simplex
    over the groups and one group more, all of 0 for the lower end and of 1 for the upper. For
    values that are 0 or 1 in groups of one size it is the exact interval of Clopper and Pearson,
    so 4 of 4 is 0.40 to 1. Parameters are those of `mean_interval`; None for a single group.
    """
    sums, sizes = _clusters(values, groups)
    count = len(sums)
    if count < 2:
        return None
    drawn = np.random.default_rng(0).dirichlet(np.ones(count + 1), size=_DRAWS)
    weights, beyond = drawn[:, :count], drawn[:, count] * sizes.mean()
    total = weights @ sizes + beyond
    tail = (1.0 - level) / 2
    low = np.quantile(weights @ sums / total, tail)
    high = np.quantile((weights @ sums + beyond) / total, 1.0 - tail)
    return float(max(low, 0.0)), float(min(high, 1.0))


def _clusters(
    values: Sequence[float], groups: Sequence[object] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sum and the number of the values of each group."""
    if not len(values):
        raise BractError("an interval needs at least one value, found none")
    array = np.asarray(values, dtype=np.float64)
    if groups is None:
        return array, np.ones(len(array))
    place = {key: i for i, key in enumerate(dict.fromkeys(groups))}
    at = np.array([place[key] for key in groups])
    sums: NDArray[np.float64] = np.bincount(at, weights=array).astype(np.float64)
    return sums, np.bincount(at).astype(np.float64)


@lru_cache
def _student(level: float, freedom: float) -> float:
    from scipy.stats import t

    return float(t.ppf((1.0 + level) / 2, freedom))


def _pairwise_mse(rows: Tensor, columns: Tensor) -> Tensor:
    left = rows.to(torch.float64).flatten(1).cpu()
    right = columns.to(torch.float64).flatten(1).cpu()
    if left.shape[1] != right.shape[1]:
        raise BractError(
            f"cannot compare images of {tuple(rows.shape[1:])} with {tuple(columns.shape[1:])}"
        )
    # Without the matrix product, which cancels: a copy must be at distance zero.
    apart = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
    return apart.square() / left.shape[1]


def _same_shape(images: Tensor, originals: Tensor) -> None:
    if images.shape != originals.shape:
        raise BractError(
            f"cannot score images of {tuple(images.shape)} against {tuple(originals.shape)}; "
            "match reconstructions to originals first"
        )
