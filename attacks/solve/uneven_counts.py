"""How often each class is there, where images count differently."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bract.attacks.problem.epoch_orders import steps_per_epoch

_ERROR = 0.1
"""Standard error of a class's share, in images that were in whole batches alone."""

_UNSHUFFLED = 0.01
"""Prior probability that a client takes its images in one order in every epoch."""

_SEEN = 20
"""Whole epochs beside which a part of one is less than the error of a share."""

_MOST = 2**23
"""Most costs of classes, images and images of the part, and most sums of classes by images squared:
about a second each."""


def uneven_counts(shares: Tensor, images: int, batch_size: int, steps: int) -> Tensor | None:
    """Return the likeliest counts of classes, of a client whose last batches were smaller.

    An image of a step counts one over the step's batch, so that an image in a smaller last batch
    counts more, and one that a part of an epoch took counts once more. Of a class of n images, x
    times in a smaller batch and y times in the part, the sum over all steps is
    ``(n F - x) / b + x / r + y / b``, for F whole epochs of batches of b and a last one of r.
    Sought are the n that add up to the images and are likeliest together with their x and y, under
    Gaussian errors of the shares and images shuffled anew every epoch, or not at all.

    Parameters
    ----------
    shares
        float64 ``(classes,)``, not negative: what each class counts, of ``images`` in all.

    Returns
    -------
    Tensor or None
        int64 ``(classes,)`` with the sum ``images``; None where there are too many to try, or
        shares are not finite.
    """
    epoch = steps_per_epoch(images, batch_size)
    whole, part = divmod(steps, epoch)
    part = part if whole <= _SEEN else 0
    if not whole or not bool(shares.isfinite().all()):
        return None
    totals, which = np.unique((shares * steps / images).numpy(), return_inverse=True)
    tried = len(totals) * (images + 1) * (images + 1 if part else 1)
    if max(tried, len(shares) * (images + 1) ** 2) > _MOST:
        return None
    found = []
    for anew, prior in ((True, 1.0 - _UNSHUFFLED), (False, _UNSHUFFLED)):
        costs = _Client(images, batch_size, whole, part, anew).costs(totals)
        counts, cost = _least(costs[which], images)
        found.append((cost - math.log(prior), counts))
    likeliest = torch.from_numpy(min(found, key=lambda one: one[0])[1])
    return likeliest if int(likeliest.sum()) == images else None


@dataclass(frozen=True)
class _Client:
    """How a client goes through its images.

    Attributes
    ----------
    whole, part
        Whole epochs, and batches of another one.
    anew
        Whether it shuffles in every epoch.
    """

    images: int
    batch_size: int
    whole: int
    part: int
    anew: bool

    def costs(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the least negative log-likelihood of 0 to all images of each class, by its sum."""
        from scipy.stats import binom

        counts = np.arange(self.images + 1)
        found = np.full((len(totals), len(counts)), np.inf)
        taken = self.part * self.batch_size / self.images
        error = _ERROR * self.whole / self.batch_size
        for once in range(len(counts) if taken else 1):
            left = totals[:, None] - (counts * self.whole + once) / self.batch_size
            here = -binom.logpmf(once, counts, taken) if taken else 0.0
            for times, extra in self._times(left, counts):
                cost = 0.5 * ((left - times * extra) / error) ** 2 - self._log_times(times, counts)
                found = np.minimum(found, cost + here)
        return found

    def _times(
        self, left: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], float]]:
        """Yield how often images may have been in the smaller batch, and what each time adds."""
        rest = self.images % self.batch_size
        if not rest:
            yield np.zeros(left.shape, dtype=np.int64), 0.0
            return
        extra = 1.0 / rest - 1.0 / self.batch_size
        each = 1 if self.anew else self.whole
        for rounded in (np.floor, np.ceil):
            times = each * rounded(left / (extra * each)).clip(0, 2**52)
            yield np.minimum(times.astype(np.int64), counts * self.whole), extra

    def _log_times(
        self, times: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        from scipy.stats import binom

        smaller = self.images % self.batch_size / self.images
        if not smaller:
            return np.zeros(times.shape)
        if self.anew:
            return np.asarray(binom.logpmf(times, counts * self.whole, smaller))
        return np.asarray(binom.logpmf(times // self.whole, counts, smaller))


def _least(costs: NDArray[np.float64], images: int) -> tuple[NDArray[np.int64], float]:
    """Return one number a row, with a given sum and the least sum of costs, and that sum."""
    best = np.full(images + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for row in costs:
        # By the sum so far and the number that this class adds.
        sums = np.full((images + 1, images + 1), np.inf)
        for number in range(images + 1):
            if np.isfinite(row[number]):
                sums[number:, number] = best[: images + 1 - number] + row[number]
        chosen.append(sums.argmin(axis=1))
        best = sums.min(axis=1)
    left, found = images, []
    for pick in reversed(chosen):
        found.append(int(pick[left]))
        left -= found[-1]
    return np.array(found[::-1], dtype=np.int64), float(best[images])
