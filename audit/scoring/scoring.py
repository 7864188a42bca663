"""Scores of one reconstruction against what the client really used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bract.audit.captures import Capture
from bract.audit.scoring.metrics import (
    identifiability,
    label_accuracy,
    match,
    mse,
    psnr,
    ssim,
)
from bract.audit.scoring.perceptual import (
    lpips_distance,
    lpips_unavailable,
    stlpips_distance,
    stlpips_unavailable,
)
from bract.errors import BractError, one_line
from bract.names import check_name
from bract.schema import Scores

_log = logging.getLogger(__name__)

_ROUNDING = 1e-3
"""By how much pixels may lie outside of [0, 1] for the rounding of a normalisation's figures."""

_NARROW = 0.25
"""A range of pixels below which their normalisation is doubted."""


@dataclass(frozen=True)
class Truth:
    """Originals at a consenting client: float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ScoredImages:
    """Reconstructions beside the originals that they were matched to.

    Attributes
    ----------
    rows
        Scores of each pair.
    order
        ``images[order]`` are the reconstructions of the pairs.
    originals, labels
        The originals of the pairs and their true labels.
    label_accuracy
        Share of these labels that was recovered, as multisets; None where none were given.
    identified
        Whether originals had to be retrieved; ``rank`` is None where not.
    candidates
        Images among which an original had to be retrieved, itself included; None without any.
    """

    rows: list[Scores]
    order: Tensor
    originals: Tensor
    labels: list[int]
    label_accuracy: float | None
    identified: bool
    candidates: int | None


def load_truth(folder: Path, capture: Capture) -> Truth | None:
    """Read what the client kept of this round; None, with a warning, where it is not readable.

    Of an aggregate it is what all its clients kept, or None where one of them kept nothing.

    Raises
    ------
    BractError
        If a client's name is no safe name of a folder.
    """
    kept = [
        _load_client(folder, client, capture) for client in capture.members or (capture.client,)
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
            "lies in a folder of its name, which is the truth-dir of its node config, or lies in "
            "the folder of bract.client.keep"
        )


def _load_client(folder: Path, client: str, capture: Capture) -> Truth | None:
    path = folder / check_name(client) / f"round-{capture.round:04d}.safetensors"
    if not path.is_file():
        return None
    try:
        content = load_file(path)
        declaration = capture.declaration
        if "inputs" in content:
            images = pixels_of(content["inputs"], declaration.mean, declaration.std)
        else:
            images = content["images"]
        return _checked(images, content["labels"], declaration.image_shape)
    except (OSError, KeyError, TypeError, ValueError, BractError, SafetensorError) as error:
        reason = one_line(error, 200)
        _log.warning("%s: not readable (%s); %s is unscored", path, reason, capture.key)
        return None


def pixels_of(inputs: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Return the pixels in [0, 1] of model inputs ``(N, C, H, W)``.

    A normalisation whose ``std`` is too small squeezes pixels together, which flatters every
    distance in them. So pixels that cover less than a quarter of their range count only where they
    lie on the 256 steps of a picture file.

    Raises
    ------
    BractError
        If this is not what the normalisation makes of pixels.
    """
    if inputs.dim() != 4 or inputs.dtype != torch.float32 or not len(inputs):
        raise BractError(f"inputs are {inputs.dtype} {tuple(inputs.shape)}, expected (N, C, H, W)")
    channels = inputs.shape[1]
    scale, shift = (
        torch.tensor(tuple(values) if values else (other,) * channels)
        for values, other in ((std, 1.0), (mean, 0.0))
    )
    if len(scale) != channels or len(shift) != channels:
        raise BractError(
            f"inputs have {channels} channels, the normalisation has {len(shift)}; "
            "correct input.mean and input.std"
        )
    pixels = inputs * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
    low, high = float(pixels.min()), float(pixels.max())
    if not -_ROUNDING <= low <= high <= 1.0 + _ROUNDING:
        raise BractError(
            f"the client's inputs give pixels from {low:.3g} to {high:.3g}, expected 0 to 1; "
            f"its inputs are {float(inputs.min()):.3g} to {float(inputs.max()):.3g}: correct "
            "input.mean and input.std"
        )
    if high - low < _NARROW and not on_steps(pixels):
        raise BractError(
            f"the client's inputs give pixels from {low:.3g} to {high:.3g}, a small part of 0 to "
            f"1, and not on a picture's 256 steps; its inputs are {float(inputs.min()):.3g} to "
            f"{float(inputs.max()):.3g}: correct input.mean and input.std"
        )
    return pixels.clamp(0.0, 1.0)


def on_steps(pixels: Tensor) -> bool:
    """Tell whether pixels in [0, 1] lie on the 256 steps of a picture file."""
    steps = pixels * 255.0
    return bool(((steps - steps.round()).abs() < 0.02).all())


def _checked(images: Tensor, labels: Tensor, shape: tuple[int, int, int] | None) -> Truth:
    """Return the truth, whose file may come from somebody else."""
    count = images.shape[:1]
    if images.dtype != torch.float32 or images.dim() != 4 or not len(images):
        raise BractError(f"images are {images.dtype} {tuple(images.shape)}, expected (N, C, H, W)")
    if shape is not None and tuple(images.shape[1:]) != shape:
        raise BractError(f"images are {tuple(images.shape[1:])}, the capture declares {shape}")
    if labels.dtype != torch.int64 or labels.shape != count:
        raise BractError(f"labels are {labels.dtype} {tuple(labels.shape)}, expected {count}")
    if not bool(((images >= 0.0) & (images <= 1.0)).all()):
        raise BractError("images have values outside of [0, 1]")
    if not bool((labels >= 0).all()):
        raise BractError("labels are below 0")
    return Truth(images, labels)


def score_images(
    images: Tensor,
    truth: Truth,
    *,
    recovered: Tensor | None = None,
    candidates: Tensor | None = None,
    identify: bool = True,
    perceptual: bool = True,
) -> ScoredImages:
    """Match reconstructions to originals, one to one, and score the pairs.

    Where fewer images were reconstructed than the client used, each one is scored against the
    original that it explains best, and only those originals count. Choosing the original that way
    would identify noise too, so identification is left open then.

    Parameters
    ----------
    images
        float32 ``(B, C, H, W)`` in [0, 1].
    recovered
        int64 ``(B,)``, the labels that the attacker found; None leaves their accuracy open.
    candidates
        Reference images for retrieval, without the originals; None leaves identification open.
    identify
        False leaves identification open, for originals that were chosen by other images.
    perceptual
        False leaves out LPIPS, which runs a network.
    """
    identify = identify and candidates is not None and len(images) >= len(truth.images)
    order, kept = pair(images, truth.images)
    paired, originals, labels = images[order], truth.images[kept], truth.labels[kept]
    columns: dict[str, Tensor | None] = {
        "mse": mse(paired, originals),
        "psnr": psnr(paired, originals),
        "ssim": ssim(paired, originals),
    }
    if perceptual:
        columns |= {
            "lpips_alex": lpips_distance(paired, originals, "alex"),
            "lpips_vgg": lpips_distance(paired, originals, "vgg"),
            "stlpips": stlpips_distance(paired, originals),
        }
    rows = [
        {name: None if values is None else float(values[i]) for name, values in columns.items()}
        for i in range(len(paired))
    ]
    if identify and candidates is not None:
        for row, rank in zip(
            rows, identifiability(paired, originals, candidates).tolist(), strict=True
        ):
            row |= {"rank": rank, "identified_top1": rank == 1, "identified_top5": rank <= 5}
    return ScoredImages(
        rows=[Scores.model_validate(row) for row in rows],
        order=order,
        originals=originals,
        labels=labels.tolist(),
        label_accuracy=None if recovered is None else label_accuracy(recovered, labels),
        identified=identify,
        candidates=None if candidates is None else len(candidates) + 1,
    )


def pair(images: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices ``(order, kept)``: ``images[order]`` stands beside ``originals[kept]``.

    Every original is kept where there are as many images; else each image keeps the original that
    it explains best.
    """
    if len(images) >= len(originals):
        return match(images, originals), torch.arange(len(originals))
    return torch.arange(len(images)), match(originals, images)


def oracle(restarts: Sequence[Tensor], originals: Tensor) -> int:
    """Index of the restart with the highest mean PSNR: a choice no attacker can make.

    Report it beside the blind pick, never instead.
    """
    means = []
    for images in restarts:
        order, kept = pair(images, originals)
        means.append(float(psnr(images[order], originals[kept]).mean()))
    return int(np.argmax(means))


def lpips_notes() -> list[str]:
    """Say which perceptual columns are not available here, and how to get them."""
    reasons = (lpips_unavailable("alex"), lpips_unavailable("vgg"), stlpips_unavailable())
    return [f"not available: {reason}" for reason in reasons if reason]
