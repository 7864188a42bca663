"""Score how near a reconstruction is to its original, and decide if it counts as leaked.

The names below are imported when they are first used: a page needs the rule alone
(`bract.scores.leaks`), and scorers import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.scores.base import ScoredImages, Scorer
    from bract.scores.image import match, mse, psnr, score_images, ssim
    from bract.scores.leaks import LeakRule
    from bract.scores.scorers import scorer_of

__all__ = [
    "LeakRule",
    "ScoredImages",
    "Scorer",
    "match",
    "mse",
    "psnr",
    "score_images",
    "scorer_of",
    "ssim",
]

_PLACES = {
    "LeakRule": "bract.scores.leaks",
    "ScoredImages": "bract.scores.base",
    "Scorer": "bract.scores.base",
    "match": "bract.scores.image",
    "mse": "bract.scores.image",
    "psnr": "bract.scores.image",
    "score_images": "bract.scores.image",
    "scorer_of": "bract.scores.scorers",
    "ssim": "bract.scores.image",
}

__getattr__ = lazily(__name__, _PLACES)
