"""What one scored reconstruction gives a result: the metrics of each of its images."""

from __future__ import annotations

from collections.abc import Mapping

from bract.scores.base import ScoredImages

READABLE = 0.5
"""SSIM from which an image counts as recognisable."""


def sample_values(
    scored: ScoredImages, values: Mapping[str, float | None]
) -> list[dict[str, float | None]]:
    """Return the metrics of each image by name, with ``values`` that hold for all of them.

    Metrics that an image has no value of are left out.
    """
    found: list[dict[str, float | None]] = []
    for row in scored.rows:
        sample: dict[str, float | None] = {
            "psnr": row.psnr,
            "ssim": row.ssim,
            "mse": row.mse,
            "lpips_alex": row.lpips_alex,
            "lpips_vgg": row.lpips_vgg,
            "label_accuracy": scored.label_accuracy,
            **values,
        }
        if row.ssim is not None:
            sample["recognisable"] = float(row.ssim >= READABLE)
        if row.rank is not None:
            sample["top1"], sample["top5"] = float(row.rank <= 1), float(row.rank <= 5)
        found.append({name: value for name, value in sample.items() if value is not None})
    return found
