"""Scores as columns of a row: means, 95 % intervals, and the single values behind them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from bract.inputs import Truth
from bract.schema.audit import EXACT_DB
from bract.scores.base import ScoredImages
from bract.scores.image import score_images
from experiments.harness.baselines import class_mean, random_image
from experiments.harness.crossed import crossed_interval, spread_over
from experiments.harness.images import ImageSet
from experiments.harness.result import Row

_BOUNDS = {
    "auc": (0.0, 1.0),
    "tpr_1": (0.0, 1.0),
    "tpr_5": (0.0, 1.0),
    "psnr": (0.0, EXACT_DB),
    "ssim": (-1.0, 1.0),
}
"""What means cannot leave."""


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return statistics.fmean(values) if values else None


def ends(
    name: str,
    values: Sequence[float],
    images: Sequence[int] | None = None,
    networks: Sequence[int] | None = None,
) -> dict[str, float | None]:
    """Return the ends of a mean's 95 % interval as columns, None where there is none."""
    of = range(len(values)) if images is None else images
    bounds = _BOUNDS.get(name)
    found = crossed_interval(values, of, networks, bounds=bounds) if values else None
    low, high = found or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def columns(
    name: str,
    values: Sequence[float],
    images: Sequence[int] | None = None,
    networks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the mean of a score, its interval and its single values, as columns.

    Parameters
    ----------
    images, networks
        What each value was drawn with (`experiments.harness.crossed.crossed_interval`); without
        images each value has its own, without networks all have one.
    """
    of = range(len(values)) if images is None else images
    return {
        name: mean(values),
        **ends(name, values, of, networks),
        f"{name}_each": list(values),
        "interval_over": spread_over(of, networks),
    }


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and half width of the 95 % t interval; None from a single value."""
    from scipy.stats import t

    centre = statistics.fmean(values)
    if len(values) < 2:
        return centre, None
    spread = statistics.stdev(values) / len(values) ** 0.5
    return centre, float(t.ppf(0.975, len(values) - 1)) * spread


def gain_over(reference: list[float], row: Row) -> Row:
    """Return the mean difference from a reference's images, its interval and the verdict."""
    apart = [own - other for own, other in zip(row["psnr_each"], reference, strict=True)]
    if not any(apart):
        return {"gain": 0.0, "gain_low": None, "gain_high": None, "verdict": "reference"}
    low, high = crossed_interval(apart, row["sources_each"], row["networks_each"]) or (None, None)
    verdict = "open"
    if low is not None and high is not None:
        verdict = "gains" if low > 0.0 else "loses" if high < 0.0 else "open"
    return {"gain": mean(apart), "gain_low": low, "gain_high": high, "verdict": verdict}


def of_score(scored: Sequence[ScoredImages], name: str) -> list[float]:
    """Return one score of every image that has it."""
    return [
        value for each in scored for row in each.rows if (value := getattr(row, name)) is not None
    ]


def without_gradient(images: ImageSet, seed: int) -> Iterator[tuple[str, list[ScoredImages]]]:
    """Yield the baselines that see no gradient, by name: one scored image for each original."""
    count = len(images.images)
    made: dict[str, Tensor] = {
        "class mean": class_mean(images.candidates, images.candidate_labels, images.labels),
        "random image": random_image(images.candidates, count, seed=seed),
    }
    for name, given in made.items():
        yield (
            name,
            [
                score_images(
                    given[i : i + 1],
                    Truth(images.images[i : i + 1], images.labels[i : i + 1]),
                    candidates=images.candidates,
                    perceptual=False,
                )
                for i in range(count)
            ],
        )
