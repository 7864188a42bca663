"""How near a reconstruction is to its original, and the rule by which it counts as leaked.

The names below are imported when they are first used: a page needs the rule alone
(`bract.scores.leaks`), and scorers import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "LeakRule": "leaks",
    "ScoredImages": "base",
    "Scorer": "base",
    "match": "image",
    "mse": "image",
    "psnr": "image",
    "score_images": "image",
    "scorer_of": "scorers",
    "ssim": "image",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
