"""Loss and accuracy of a model on images with labels, the same on both sides."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bract.data.spec import DataSpec
from bract.models.losses import loss_of

MOST = 256
"""Records that a model takes at once."""

PIXELS, TOKENS = 2**22, 2**10
"""Values of images and tokens of texts that it takes at once: a layer's outputs are many times more
of a large model."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    spec: DataSpec,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """Return the mean loss and the accuracy in [0, 1]; NaN for both where there are no images.

    A predicted number counts as right within `bract.models.losses.CLOSE`.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``; of tokens ``(N, T)``.
    """
    if len(images) == 0:
        return math.nan, math.nan
    model.to(device).eval()
    objective = loss_of(spec.loss)
    loss, correct = 0.0, 0.0
    each = at_once(spec)
    for part, part_labels in zip(images.split(each), labels.split(each), strict=True):
        logits = model(spec.normalise(part.to(device)))
        truth = part_labels.to(device)
        loss += len(part) * float(objective.mean(logits, truth))
        correct += float(objective.right(logits, truth).sum())
    return loss / len(images), correct / len(images)


def at_once(spec: DataSpec) -> int:
    """Return how many records `evaluate` gives a model at once, at least 1."""
    values = max(1, math.prod(spec.image_shape))
    return max(1, min(MOST, (PIXELS if spec.text is None else TOKENS) // values))
