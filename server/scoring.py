"""Scores of one reconstruction against what the client really used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bract.attacks.metrics import (
    identifiability,
    label_accuracy,
    match,
    mse,
    psnr,
    ssim,
)
from bract.attacks.perceptual import (
    lpips_distance,
    lpips_unavailable,
    stlpips_distance,
    stlpips_unavailable,
)
from bract.errors import BractError
from bract.server.captures import Capture

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Truth:
    """What a consenting client kept: float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ScoredImages:
    """Reconstructions beside the originals that they were matched to.

    Attributes
    ----------
    rows
        Scores of each pair, by name.
    order
        ``images[order]`` are the reconstructions of the pairs.
    originals, labels
        The originals of the pairs and their true labels.
    label_accuracy
        Share of these labels that was guessed, as multisets.
    identified
        Whether originals had to be retrieved; ``rank`` is None where not.
    candidates
        Images among which an original had to be retrieved, itself included.
    """

    rows: list[dict[str, Any]]
    order: Tensor
    originals: Tensor
    labels: list[int]
    label_accuracy: float
    identified: bool
    candidates: int


def load_truth(folder: Path, capture: Capture) -> Truth | None:
    """Read what the client kept of this round; None, with a warning, where it is not readable.

    Of an aggregate it is what all its clients kept, or None where one of them kept nothing.
    """
    kept = [
        _load_client(folder / client / f"round-{capture.round:04d}.safetensors", capture)
        for client in capture.members or (capture.client,)
    ]
    known = [truth for truth in kept if truth is not None]
    if len(known) < len(kept):
        return None
    return Truth(torch.cat([t.images for t in known]), torch.cat([t.labels for t in known]))


def check_truth(folder: Path, captures: Sequence[Capture]) -> None:
    """Refuse a folder that holds no truth of any of these captures' clients.

    Raises
    ------
    BractError
        Naming the clients' folders that were expected in it.
    """
    clients = sorted({client for c in captures for client in c.members or (c.client,)})
    if not any((folder / client).is_dir() for client in clients):
        raise BractError(
            f"{folder}: holds none of the folders {', '.join(clients)}; the truth of a client "
            "lies in a folder of its name, which is the truth-dir of its node config"
        )


def _load_client(path: Path, capture: Capture) -> Truth | None:
    if not path.is_file():
        return None
    try:
        content = load_file(path)
        return Truth(content["images"], content["labels"])
    except (OSError, KeyError, SafetensorError) as error:
        _log.warning("%s: not readable (%s); %s is unscored", path, error, capture.key)
        return None


def score_images(
    images: Tensor,
    guessed: Tensor,
    truth: Truth,
    candidates: Tensor,
    *,
    identify: bool = True,
) -> ScoredImages:
    """Match reconstructions to originals, one to one, and score the pairs.

    Where fewer images were reconstructed than the client used, each one is scored against the
    original that it explains best, and only those originals count. Choosing the original that way
    would identify noise too, so identification is left open then.

    Parameters
    ----------
    images
        float32 ``(B, C, H, W)`` in [0, 1].
    guessed
        int64 ``(B,)``, the labels that the attacker found.
    candidates
        Reference images for retrieval, without the originals.
    identify
        False leaves identification open, for originals that were chosen by other images.
    """
    identify = identify and len(images) >= len(truth.images)
    if len(images) >= len(truth.images):
        order, kept = match(images, truth.images), torch.arange(len(truth.images))
    else:
        order, kept = torch.arange(len(images)), match(truth.images, images)
    paired, originals, labels = images[order], truth.images[kept], truth.labels[kept]
    columns: dict[str, Tensor | None] = {
        "mse": mse(paired, originals),
        "psnr": psnr(paired, originals),
        "ssim": ssim(paired, originals),
        "lpips_alex": lpips_distance(paired, originals, "alex"),
        "lpips_vgg": lpips_distance(paired, originals, "vgg"),
        "stlpips": stlpips_distance(paired, originals),
    }
    ranks: list[int | None] = [None] * len(paired)
    if identify:
        ranks = identifiability(paired, originals, candidates).tolist()
    rows = [
        {name: None if values is None else float(values[i]) for name, values in columns.items()}
        | {
            "rank": rank,
            "identified_top1": None if rank is None else rank == 1,
            "identified_top5": None if rank is None else rank <= 5,
        }
        for i, rank in enumerate(ranks)
    ]
    return ScoredImages(
        rows=rows,
        order=order,
        originals=originals,
        labels=labels.tolist(),
        label_accuracy=label_accuracy(guessed, labels),
        identified=identify,
        candidates=len(candidates) + 1,
    )


def lpips_notes() -> list[str]:
    """Say which perceptual columns are not available here, and how to get them."""
    reasons = (lpips_unavailable("alex"), lpips_unavailable("vgg"), stlpips_unavailable())
    return [f"not available: {reason}" for reason in reasons if reason]
