"""Score reconstructions of images against the originals: distances, matching, retrieval.

Images are float32 ``(N, C, H, W)`` in [0, 1] throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from bract.errors import BractError
from bract.inputs import References, Truth
from bract.schema.audit import (
    EXACT_DB,
    Baseline,
    Scores,
)
from bract.scores.base import ScoredImages, Scorer, beside, target_error
from bract.scores.chance import (
    Array,
    dissimilarity,
    views,
)
from bract.scores.perceptual import (
    lpips_distance,
    lpips_unavailable,
    stlpips_distance,
    stlpips_unavailable,
)

MOST_CLASSES = 20
"""Classes of one client whose reference images are all decoded; beyond, the matched one represents
the others."""


class ImageScorer(Scorer):
    """Scores images against the originals of updates; references are decoded once a class.

    Parameters
    ----------
    references
        Images that no client of the update trained on; None leaves identification open.
    """

    most_classes = MOST_CLASSES

    def __init__(self, references: References | None) -> None:
        super().__init__(references)
        self._views: dict[int, Array] = {}

    def score(
        self, images: Tensor, truth: Truth, *, recovered: Tensor | None = None
    ) -> ScoredImages:
        """Match the images of the blind pick to the originals, and score the pairs."""
        candidates = None if self.references is None else self.references.candidates
        return score_images(
            images,
            truth,
            recovered=recovered,
            candidates=candidates,
            perceptual=self.perceptual,
        )

    def oracle(self, restarts: Sequence[Tensor], scored: ScoredImages) -> list[Scores]:
        """Score the restart that is nearest to the originals of the blind pick."""
        best = restarts[oracle(restarts, scored.originals)]
        truth = Truth(scored.originals, torch.zeros(len(scored.originals)))
        candidates = None if self.references is None else self.references.candidates
        return score_images(best, truth, candidates=candidates, identify=scored.identified).rows

    def baselines(
        self, made: Mapping[str, Tensor], scored: ScoredImages, truth: Truth, count: int
    ) -> dict[str, list[Baseline]]:
        """Score baselines as the attack was: as many images, with the same choice of originals.

        Each set is matched to all of the client's originals, as `beside` says.
        """
        chosen = count < len(truth.images)
        found = {}
        for name, images in made.items():
            if len(images) >= len(scored.rows):
                rows = score_images(images, truth, perceptual=False).rows
                found[name] = beside(rows, scored.rows, squared_error, chosen=chosen)
        return found

    def apart(self, example: Tensor, others: Tensor) -> Array:
        """Return one minus the correlation with the most fitting blur of each, ``(1, M)``."""
        return dissimilarity(example, views(others))

    def apart_from_class(self, example: Tensor, label: int) -> Array:
        """Return how far an image is from the references of a class, decoded once."""
        return dissimilarity(example, self._of_class(label))

    def classes(self, labels: Tensor) -> list[int]:
        """Return the class of each label; one for all where the target is a number."""
        return [0] * len(labels) if labels.is_floating_point() else super().classes(labels)

    def notes(self) -> list[str]:
        """Return which perceptual columns are not available here, and how to get them."""
        return lpips_notes()

    def _of_class(self, label: int) -> Array:
        """Return the `views` of the references with a label."""
        if label not in self._views and self.references is not None:
            images = self.references.of_class(label)
            whole = images if len(images) else self.references.candidates
            self._views[label] = views(whole)[:, : len(images)]
        return self._views[label]


def squared_error(row: Scores) -> float:
    """Return the mean squared error of one reconstruction, 0 where it has none."""
    return row.mse or 0.0


def mean_of(rows: Sequence[Baseline]) -> Baseline:
    """Return the mean of every score over the rows that have it."""
    known = {
        name: [value for row in rows if (value := getattr(row, name)) is not None]
        for name in Baseline.model_fields
    }
    return Baseline(**{name: fmean(values) if values else None for name, values in known.items()})


def score_images(
    images: Tensor,
    truth: Truth,
    *,
    recovered: Tensor | None = None,
    candidates: Tensor | None = None,
    identify: bool = True,
    perceptual: bool = True,
) -> ScoredImages:
    """Match reconstructions to originals, one to one, and score the pairs.

    Where fewer images were reconstructed than the client used, each one is scored against the
    original that it explains best, and only those originals count. Choosing the original that way
    would identify noise too, so identification is left open then.

    Parameters
    ----------
    images
        float32 ``(B, C, H, W)`` in [0, 1].
    recovered
        int64 ``(B,)``, the labels that the attacker found, or numbers ``(B, values)``; None leaves
        them unscored.
    candidates
        Reference images for retrieval, without the originals; None leaves identification open.
    identify
        False leaves identification open, for originals that were chosen by other images.
    perceptual
        False leaves out LPIPS, which runs a network.
    """
    identify = identify and candidates is not None and len(images) >= len(truth.images)
    order, kept = pair(images, truth.images)
    paired, originals, labels = images[order], truth.images[kept], truth.labels[kept]
    numbers = labels.is_floating_point()
    columns: dict[str, Tensor | None] = {
        "mse": mse(paired, originals),
        "psnr": psnr(paired, originals),
        "ssim": ssim(paired, originals),
    }
    if perceptual:
        columns |= {
            "lpips_alex": lpips_distance(paired, originals, "alex"),
            "lpips_vgg": lpips_distance(paired, originals, "vgg"),
            "stlpips": stlpips_distance(paired, originals),
        }
    rows = [
        {name: None if values is None else float(values[i]) for name, values in columns.items()}
        for i in range(len(paired))
    ]
    if identify and candidates is not None:
        for row, rank in zip(
            rows, identifiability(paired, originals, candidates).tolist(), strict=True
        ):
            row |= {"rank": rank, "identified_top1": rank == 1, "identified_top5": rank <= 5}
    return ScoredImages(
        rows=[Scores.model_validate(row) for row in rows],
        order=order,
        originals=originals,
        labels=[0] * len(rows) if numbers else labels.tolist(),
        label_accuracy=None if recovered is None or numbers else label_accuracy(recovered, labels),
        target_error=target_error(recovered[order], labels)
        if recovered is not None and numbers
        else None,
        identified=identify,
        candidates=None if candidates is None else len(candidates) + 1,
    )


def pair(images: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices ``(order, kept)``: ``images[order]`` stands beside ``originals[kept]``.

    Every original is kept where there are as many images; else each image keeps the original that
    it explains best.
    """
    if len(images) >= len(originals):
        return match(images, originals), torch.arange(len(originals))
    return torch.arange(len(images)), match(originals, images)


def oracle(restarts: Sequence[Tensor], originals: Tensor) -> int:
    """Index of the restart with the highest mean PSNR: a choice no attacker can make.

    Report it beside the blind pick, never instead.
    """
    means = []
    for images in restarts:
        order, kept = pair(images, originals)
        means.append(float(psnr(images[order], originals[kept]).mean()))
    return int(np.argmax(means))


def lpips_notes() -> list[str]:
    """Say which perceptual columns are not available here, and how to get them."""
    reasons = (lpips_unavailable("alex"), lpips_unavailable("vgg"), stlpips_unavailable())
    return [f"not available: {reason}" for reason in reasons if reason]


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
        raise BractError(
            f"SSIM needs images of at least 3x3 pixels, found {side}", code="data-shape"
        )
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
            "to one; match the originals to the reconstructions instead",
            code="data-shape",
        )
    cost = _pairwise_mse(originals, images)
    rows, columns = linear_sum_assignment(cost.numpy())
    order = np.empty(len(originals), dtype=np.int64)
    order[rows] = columns
    return torch.from_numpy(order)


def label_accuracy(recovered: Tensor, labels: Tensor) -> float:
    """Share of true labels that were recovered, as multisets: the order of a batch is arbitrary.

    Of a model with one output a recovered label is a number, and counts as the nearest class.
    """
    if recovered.is_floating_point():
        recovered = recovered.round().clamp_min(0).long()
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


def _pairwise_mse(rows: Tensor, columns: Tensor) -> Tensor:
    left = rows.to(torch.float64).flatten(1).cpu()
    right = columns.to(torch.float64).flatten(1).cpu()
    if left.shape[1] != right.shape[1]:
        raise BractError(
            f"cannot compare images of {tuple(rows.shape[1:])} with {tuple(columns.shape[1:])}",
            code="data-shape",
        )
    # Without the matrix product, which cancels: a copy must be at distance zero.
    apart = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
    return apart.square() / left.shape[1]


def _same_shape(images: Tensor, originals: Tensor) -> None:
    if images.shape != originals.shape:
        raise BractError(
            f"cannot score images of {tuple(images.shape)} against {tuple(originals.shape)}; "
            "match reconstructions to originals first",
            code="data-shape",
        )
