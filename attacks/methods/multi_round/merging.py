"""Images of several rounds, put together: which of them are copies of one image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bract.attacks.problem.over_rounds import Assigned
from bract.attacks.result import Reconstruction


def merge(found: Sequence[Reconstruction], same: float) -> tuple[Tensor, Tensor, Assigned]:
    """Gather the images of several rounds; those that two rounds share are included once.

    A round's batch holds an image once, so that its images go to different ones of the pool: the
    assignment of the largest total correlation (Kuhn 1955) among those of one label. The copy of
    the round that is matched best is kept.

    Parameters
    ----------
    found
        One a round.
    same
        Least correlation of two copies.

    Returns
    -------
    tuple
        Images ``(M, C, H, W)``, labels int64 ``(M,)``, and the positions of each round's images.
    """
    order = sorted(range(len(found)), key=lambda i: _residual(found[i]))
    pool: list[Tensor] = []
    labels: list[int] = []
    rows: dict[int, tuple[int, ...]] = {}
    for number in order:
        images, own = found[number].images, found[number].labels.tolist()
        places = _matched(images, own, pool, labels, same)
        row = []
        for image, label, place in zip(images, own, places, strict=True):
            if place is None:
                pool.append(image)
                labels.append(label)
                place = len(pool) - 1
            row.append(place)
        rows[number] = tuple(row)
    return torch.stack(pool), torch.tensor(labels), tuple(rows[i] for i in range(len(found)))


def merged_alike(
    images: Tensor, labels: Tensor, assigned: Assigned, same: float
) -> tuple[Tensor, Tensor, Assigned]:
    """Merge images of one label that have become alike, and leave out those of no round."""
    rows = [list(row) for row in assigned]
    alike = correlation(images, images)
    for later in range(len(images)):
        for earlier in range(later):
            together = any(later in row and earlier in row for row in rows)
            if labels[later] == labels[earlier] and alike[later, earlier] >= same and not together:
                rows = [[earlier if place == later else place for place in row] for row in rows]
                break
    kept = sorted({place for row in rows for place in row})
    at = {place: position for position, place in enumerate(kept)}
    return images[kept], labels[kept], tuple(tuple(at[p] for p in row) for row in rows)


def correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return Pearson's correlation of pixels, ``(A, B)`` for ``(A, ...)`` and ``(B, ...)``."""
    a, b = (
        v.flatten(1).double() - v.flatten(1).double().mean(1, keepdim=True) for v in (left, right)
    )
    found: Tensor = (a @ b.T) / (a.norm(dim=1)[:, None] * b.norm(dim=1)[None]).clamp_min(1e-12)
    return found


def _matched(
    images: Tensor, own: Sequence[int], pool: Sequence[Tensor], labels: Sequence[int], same: float
) -> list[int | None]:
    """Return the place in the pool of each image, None for those that are new."""
    from scipy.optimize import linear_sum_assignment

    if not pool:
        return [None] * len(images)
    alike = correlation(images, torch.stack(list(pool)))
    fits = torch.tensor(own)[:, None] == torch.tensor(list(labels))[None]
    gain = torch.where(fits & (alike >= same), alike, torch.zeros_like(alike))
    places: list[int | None] = [None] * len(images)
    for image, place in zip(*linear_sum_assignment(gain.numpy(), maximize=True), strict=True):
        if gain[image, place] > 0.0:
            places[int(image)] = int(place)
    return places


def _residual(found: Reconstruction) -> float:
    return float("inf") if found.gradient_residual is None else found.gradient_residual
