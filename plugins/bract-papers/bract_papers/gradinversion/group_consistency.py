"""Restarts of one upload that hold each other together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks import Problem

REACH = 4
"""Most pixels by which images are shifted onto their mean, in each direction."""

_EQUAL = 1e-5
"""Correlation coefficients that differ by less are equal."""


@dataclass(frozen=True, kw_only=True)
class GroupConsistency:
    """Distance of each restart's images to the consensus of all restarts of the same upload.

    The group term of GradInversion (Yin et al. 2021): ``|x - E|^2`` with E the mean of all
    restarts' images after each was registered on their plain mean. The paper registers by
    RANSAC-flow; here each image is shifted by the whole pixels, at most `REACH`, that correlate
    best (`shift_onto`). Images of one class may be in another order in every restart, so they are
    paired with those of the first one first. E counts as fixed: without shifts its own gradient
    cancels over the restarts.

    Only restarts that run in one batch see each other (`bract.attacks.base.Attack.coupled`). A
    single one has no consensus, and nothing is added.

    Attributes
    ----------
    weight
        Factor before the mean squared distance over pixels in [0, 1].
    labels
        Classes of the images, int64 ``(L, B)``.
    """

    weight: float
    labels: Tensor

    def component(self, problem: Problem) -> str | None:
        """Nothing to agree with in a single restart."""
        return "group consistency" if any(_groups(problem)) else None

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * mean |x - E|^2`` of each trial, 0 where it is alone."""
        total = images.new_zeros(len(images))
        for group in _groups(problem):
            wanted = consensus(images[group].detach(), self.labels[group])
            apart = (images[group] - wanted).square().flatten(1).mean(dim=1)
            total = total.index_add(0, torch.tensor(group, device=images.device), apart)
        return self.weight * total


def _groups(problem: Problem) -> Iterator[list[int]]:
    """Yield the trials of each case that has several different restarts here."""
    found: dict[int, list[int]] = {}
    for trial, case in enumerate(problem.cases):
        found.setdefault(id(case), []).append(trial)
    for group in found.values():
        if 1 < len(group) == len({problem.restarts[trial] for trial in group}):
            yield group


@torch.no_grad()
def consensus(images: Tensor, labels: Tensor) -> Tensor:
    """Return what restarts agree on, in the order of each one's images.

    Parameters
    ----------
    images
        ``(G, B, C, H, W)``, one row a restart.
    labels
        int64 ``(G, B)``.

    Returns
    -------
    Tensor
        ``(G, B, C, H, W)``: the mean over restarts of paired images, each shifted onto their
        plain mean.
    """
    each = zip(images, labels, strict=True)
    pairs = torch.stack([_paired(images[0], labels[0], *row) for row in each])
    rows = torch.arange(len(images), device=images.device)[:, None]
    paired = images[rows, pairs]
    target = paired.mean(dim=0, keepdim=True).expand_as(paired)
    registered = shift_onto(target.flatten(0, 1), paired.flatten(0, 1), REACH)
    mean = registered.view_as(paired).mean(dim=0)
    found = torch.empty_like(images)
    found[rows, pairs] = mean.expand_as(images)
    return found


def _paired(first: Tensor, first_labels: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """For each image of the first restart its position among another's of the same class,
    ``(B,)``, by the least squared distances altogether; an image of a class that the other has
    too few of keeps its place."""
    pairs = torch.arange(len(images), device=images.device)
    same = torch.equal(first_labels, labels)
    if not same or len(labels.unique()) == len(labels):
        return pairs
    from scipy.optimize import linear_sum_assignment

    for label in labels.unique():
        places = (labels == label).nonzero().flatten()
        if len(places) > 1:
            apart = torch.cdist(first[places].flatten(1), images[places].flatten(1))
            rows, columns = linear_sum_assignment(apart.square().cpu().double().numpy())
            pairs[places[torch.from_numpy(rows)]] = places[torch.from_numpy(columns)]
    return pairs


def shift_onto(target: Tensor, images: Tensor, reach: int) -> Tensor:
    """Shift each image by the whole pixels that make it correlate best with its target.

    Circular cross-correlation over all channels, by FFT; what enters at an edge repeats it.

    Parameters
    ----------
    target, images
        ``(N, C, H, W)``.
    reach
        Most pixels in each direction; cut to less than half of the side.

    Returns
    -------
    Tensor
        ``(N, C, H, W)``.
    """
    side = images.shape[-1]
    reach = min(reach, (side - 1) // 2)

    wanted, given = (v - v.mean(dim=(2, 3), keepdim=True) for v in (target, images))
    product = (torch.fft.rfft2(wanted) * torch.fft.rfft2(given).conj()).sum(dim=1)
    correlation = torch.fft.irfft2(product, s=images.shape[-2:])
    steps = torch.arange(-reach, reach + 1, device=images.device)
    near = correlation[:, steps[:, None] % side, steps[None, :] % side]
    # Among equals, to rounding, the one that moves nothing.
    most = wanted.flatten(1).norm(dim=1) * given.flatten(1).norm(dim=1)
    near[:, reach, reach] += _EQUAL * most + torch.finfo(near.dtype).tiny
    best = near.flatten(1).argmax(dim=1)
    down, right = steps[best // len(steps)], steps[best % len(steps)]
    places = torch.arange(side, device=images.device)
    rows = (places - down[:, None]).clamp(0, side - 1)
    columns = (places - right[:, None]).clamp(0, side - 1)
    number = torch.arange(len(images), device=images.device)[:, None, None]
    return images.movedim(1, 3)[number, rows[:, :, None], columns[:, None, :]].movedim(3, 1)
