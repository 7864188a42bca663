"""How much a reconstruction gives away: image scores, matching, identifiability.

Images are float32 ``(N, C, H, W)`` in [0, 1] throughout. Pair reconstructions of a batch with
their originals by `match` before scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bract.errors import BractError

PSNR_CEILING = 100.0
"""dB that a perfect copy scores: a mean squared error below 1e-10 is beyond float32 pixels."""


def mse(images: Tensor, originals: Tensor) -> Tensor:
    """Mean squared error of each image, float64 ``(N,)``."""
    _same_shape(images, originals)
    difference = images.to(torch.float64) - originals.to(torch.float64)
    return difference.square().flatten(1).mean(dim=1)


def psnr(images: Tensor, originals: Tensor) -> Tensor:
    """Peak signal-to-noise ratio ``10 log10(1 / MSE)`` in dB, float64 ``(N,)``.

    Capped at `PSNR_CEILING`, so that one exact copy does not make a mean infinite. Black against
    white scores 0 dB.
    """
    return -10.0 * torch.log10(mse(images, originals).clamp_min(10 ** (-PSNR_CEILING / 10)))


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
        structural_similarity(  # type: ignore[no-untyped-call]
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


def label_accuracy(guessed: Tensor, labels: Tensor) -> float:
    """Share of true labels that were guessed, as multisets: the order of a batch is arbitrary."""
    size = int(max(guessed.max(), labels.max())) + 1
    found = torch.bincount(guessed.cpu(), minlength=size)
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
    own = mse(images, originals)
    others = _pairwise_mse(images, candidates)
    return 1 + (others <= own[:, None]).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of matched images, one entry an image, in the order of the originals.

    Attributes
    ----------
    mse, psnr, ssim
        See the functions of these names.
    label_accuracy
        Of the batch as a whole.
    rank
        See `identifiability`; None without candidates.
    candidates
        Number of candidates among which ``rank`` was found, the original included.
    """

    mse: list[float]
    psnr: list[float]
    ssim: list[float]
    label_accuracy: float | None = None
    rank: list[int] | None = None
    candidates: int | None = None


def score(
    images: Tensor,
    originals: Tensor,
    *,
    guessed_labels: Tensor | None = None,
    labels: Tensor | None = None,
    candidates: Tensor | None = None,
) -> Scores:
    """Match reconstructions to originals and score them.

    Where fewer images were reconstructed than the client used, each reconstruction is scored
    against the original it explains best, and only those originals count.
    """
    if len(images) >= len(originals):
        order = match(images, originals)
        paired, truth = images[order], originals
    else:
        order = match(originals, images)
        paired, truth = images, originals[order]
    accuracy = None
    if guessed_labels is not None and labels is not None:
        accuracy = label_accuracy(guessed_labels, labels)
    ranks = None if candidates is None else identifiability(paired, truth, candidates).tolist()
    return Scores(
        mse=mse(paired, truth).tolist(),
        psnr=psnr(paired, truth).tolist(),
        ssim=ssim(paired, truth).tolist(),
        label_accuracy=accuracy,
        rank=ranks,
        candidates=None if candidates is None else len(candidates) + 1,
    )


def oracle(restarts: Sequence[Tensor], originals: Tensor) -> int:
    """Index of the restart with the highest mean PSNR: a choice no attacker can make.

    Report it beside the blind pick, never instead.
    """
    values = [float(np.mean(score(images, originals).psnr)) for images in restarts]
    return int(np.argmax(values))


def bootstrap_interval(
    values: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    groups: Sequence[object] | None = None,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean.

    Parameters
    ----------
    groups
        One key a value. Values with one key (several seeds of one image) are drawn together, so
        that repeats of an image do not count as further images.
    """
    if not len(values):
        raise BractError("a bootstrap interval needs at least one value, found none")
    array = np.asarray(values, dtype=np.float64)
    keys = list(groups) if groups is not None else list(range(len(array)))
    clusters: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        clusters.setdefault(key, []).append(index)
    sums = np.array([array[members].sum() for members in clusters.values()])
    sizes = np.array([len(members) for members in clusters.values()])
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(sums), size=(resamples, len(sums)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _pairwise_mse(rows: Tensor, columns: Tensor) -> Tensor:
    left = rows.to(torch.float64).flatten(1).cpu()
    right = columns.to(torch.float64).flatten(1).cpu()
    if left.shape[1] != right.shape[1]:
        raise BractError(
            f"cannot compare images of {tuple(rows.shape[1:])} with {tuple(columns.shape[1:])}"
        )
    return torch.stack([(row - right).square().mean(dim=1) for row in left])


def _same_shape(images: Tensor, originals: Tensor) -> None:
    if images.shape != originals.shape:
        raise BractError(
            f"cannot score images of {tuple(images.shape)} against {tuple(originals.shape)}; "
            "match reconstructions to originals first"
        )
