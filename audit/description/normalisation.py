"""Recognise how clients normalise their pixels by the range of inputs that they kept."""

from __future__ import annotations

import torch
from torch import Tensor

USUAL = (
    ((0.0,), (1.0,)),
    ((0.5,), (0.5,)),
    ((0.1307,), (0.3081,)),  # MNIST
    ((0.2860,), (0.3530,)),  # Fashion-MNIST
    ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # CIFAR-10
    ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),  # CIFAR-100
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
)
"""Usual means and standard deviations, one value for all channels or one each."""

_REACHED = 0.02
"""Share of the range by which kept inputs may miss black and white."""


def normalisation_of(inputs: Tensor) -> tuple[list[float] | None, list[float] | None]:
    """Return the usual normalisation that makes pixels of such inputs, if there is one.

    One whose black and white the inputs reach comes before one that merely holds them.

    Parameters
    ----------
    inputs
        Model inputs ``(N, C, H, W)``.

    Returns
    -------
    tuple
        Mean and standard deviation of each channel; None where none fits.
    """
    channels = inputs.shape[1]
    each = inputs.transpose(0, 1).flatten(1)
    low, high = each.min(dim=1).values, each.max(dim=1).values
    for reached in (True, False):
        for mean, std in USUAL if reached else USUAL[:2]:
            if len(mean) not in (1, channels):
                continue
            black = -torch.tensor(mean) / torch.tensor(std)
            white = black + 1 / torch.tensor(std)
            slack = _REACHED * (white - black)
            inside = bool(((low >= black - 1e-3) & (high <= white + 1e-3)).all())
            ends = bool(((low <= black + slack) & (high >= white - slack)).all())
            if inside and (ends or not reached):
                wide = channels // len(mean)
                return list(mean) * wide, list(std) * wide
    return None, None
