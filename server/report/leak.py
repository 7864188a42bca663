"""When a reconstruction counts as a leaked image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from bract.server.report.schema import Baseline, Scores

LEAK_SSIM = 0.5
LEAK_PSNR_MARGIN = 3.0

Reason = Literal["ssim", "identified"]

LEAK_RULE = (
    f"An image counts as leaked when its reconstruction reaches an SSIM of at least {LEAK_SSIM} "
    "and more than the best guess made without the gradient, or when it picks out its own "
    "original among all candidates (top 1) and its PSNR beats that guess by at least "
    f"{LEAK_PSNR_MARGIN:g} dB."
)


def leak_reason(scores: Scores, baselines: Mapping[str, Baseline]) -> Reason | None:
    """Say by which rule an image leaked, or None if it did not.

    ``ssim``: SSIM of at least `LEAK_SSIM` and above every baseline's SSIM.
    ``identified``: top-1 identification with a PSNR at least `LEAK_PSNR_MARGIN` decibels above
    every baseline's. Baselines are the means of guesses made without the gradient for the same
    images. Where none was recorded, the SSIM threshold alone decides and the second rule cannot
    apply: a missing baseline must not hide a leak.
    """
    guess_ssim, guess_psnr = best(baselines, "ssim"), best(baselines, "psnr")
    if scores.ssim is not None and scores.ssim >= LEAK_SSIM and not _beats(guess_ssim, scores.ssim):
        return "ssim"
    if guess_psnr is None or scores.psnr is None or not scores.identified_top1:
        return None
    return "identified" if scores.psnr >= guess_psnr + LEAK_PSNR_MARGIN else None


def _beats(guess: float | None, ssim: float) -> bool:
    return guess is not None and guess >= ssim


def best(baselines: Mapping[str, Baseline], score: Literal["ssim", "psnr"]) -> float | None:
    """Return the highest SSIM or PSNR among the baselines; None where none was recorded."""
    values = [getattr(baseline, score) for baseline in baselines.values()]
    return max((value for value in values if value is not None), default=None)
