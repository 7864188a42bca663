"""Intervals and equivalence of means whose values share images and networks, two ways at once.

Each value is of one image (or picture, or client) and one network. Values that share either are not
independent, and neither grouping holds the other. The variance of the mean is the two-way
cluster-robust one of Cameron, Gelbach and Miller (2011, eq. 2.11): that between images plus that
between networks less that between their pairs, each with the factor ``G / (G - 1)`` of its number
of groups. Quantiles are Student's with the smaller number of groups less one.
``experiments/intervals.py`` measures what it covers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EQUIVALENCE_DB = 3.0
"""Decibels within which two attackers count as alike: half the mean squared error, or twice it.
Stated before any row was compared by it."""

ALIKE_DB = 10.0 * math.log10(12.0 * 255.0**2)
"""PSNR of an image that was rounded to eight bits, 58.9 dB: from there on images are alike."""

Verdict = Literal["alike", "apart", "open"]


def crossed_interval(
    values: Sequence[float],
    images: Sequence[Hashable],
    networks: Sequence[Hashable] | None,
    *,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
) -> tuple[float, float] | None:
    """Return an interval of the mean over images and networks.

    Parameters
    ----------
    values, images, networks
        A value each, with what it was drawn with: equal keys are the same image or network. None
        for networks states that there is one: the interval is over images and holds for it alone.
    level
        Coverage, in (0, 1).
    bounds
        What the mean cannot leave; the interval is cut to it.

    Returns
    -------
    tuple or None
        None where either has a single group, and where all values are alike: no spread is seen.
    """
    from scipy.stats import t

    array = np.asarray(values, dtype=np.float64)
    fewest = min(len(set(keys)) for keys in (images, networks) if keys is not None)
    if fewest < 2:
        return None
    mean = float(array.mean())
    error = math.sqrt(_variance(array - mean, images, networks))
    if error <= 1e-9 * max(1.0, abs(mean)):
        return None
    half = float(t.ppf((1.0 + level) / 2, fewest - 1)) * error
    low, high = mean - half, mean + half
    return (low, high) if bounds is None else (max(low, bounds[0]), min(high, bounds[1]))


def _variance(
    apart: NDArray[np.float64], images: Sequence[Hashable], networks: Sequence[Hashable] | None
) -> float:
    """Return the variance of the mean; where the sum is smaller, that of one grouping alone."""
    if networks is None:
        return _between(apart, images)
    pairs = list(zip(images, networks, strict=True))
    by_image, by_network, by_pair = (_between(apart, keys) for keys in (images, networks, pairs))
    return max(by_image + by_network - by_pair, by_image, by_network)


def _between(apart: NDArray[np.float64], keys: Sequence[Hashable]) -> float:
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    sums = np.bincount([place[key] for key in keys], weights=apart)
    count = len(sums)
    return float(np.square(sums).sum()) * count / (count - 1) / len(apart) ** 2


def spread_over(images: Sequence[Hashable], networks: Sequence[Hashable] | None) -> str:
    """Return what an interval of such values is over, in words."""
    if networks is None or len(set(networks)) == 1:
        return "images, one network"
    return "images and networks" if len(set(images)) > 1 else "networks, one image"


def equivalence(
    differences: Sequence[float],
    images: Sequence[Hashable],
    networks: Sequence[Hashable] | None,
    *,
    margin: float = EQUIVALENCE_DB,
) -> Verdict:
    """Test a mean difference for equivalence: two one-sided tests at 5 % (Schuirmann 1987).

    Returns
    -------
    str
        ``alike`` where the 90 % interval lies within the margin on both sides, ``apart`` where it
        lies outside on one, ``open`` else.
    """
    found = crossed_interval(differences, images, networks, level=0.90)
    mean = float(np.mean(differences))
    low, high = found or (mean, mean)
    if found is None and len(set(images)) < 2:
        return "open"
    if -margin < low and high < margin:
        return "alike"
    return "apart" if high <= -margin or low >= margin else "open"
