"""Optimise pixels directly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.attacks.problem.problem import Problem
from bract.updates.update import Tensors

Sides = tuple[int, int]
"""Height and width in pixels."""


class PixelSearch:
    """Free pixels, in the model's normalised space, with known or free labels.

    Parameters
    ----------
    inputs
        Start, ``(L, B, C, H, W)``, normalised.
    labels
        One-hot rows ``(L, B, classes)``, or None to find them jointly, from ``logits``.
    logits
        Start of the labels, ``(L, B, classes)``; of targets that are numbers the numbers
        themselves.
    """

    def __init__(
        self, problem: Problem, inputs: Tensor, labels: Tensor | None, logits: Tensor | None = None
    ) -> None:
        self._target_model = problem.target_model
        self._labels = labels
        self._numbers = problem.target_model.loss.values
        self.variables: Tensors = {"inputs": inputs.detach().clone().requires_grad_()}
        if labels is None:
            if logits is None:
                raise ValueError("joint labels need starting logits")
            self.variables["logits"] = logits.detach().clone().requires_grad_()

    @property
    def components(self) -> tuple[str, ...]:
        """Pixels, and whether labels are read off or found jointly."""
        return "pixels", "labels joint" if self._labels is None else "labels analytic"

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return pixels and label probabilities."""
        images = self._target_model.denormalise(self.variables["inputs"])
        if self._labels is not None:
            return images, self._labels
        found = self.variables["logits"]
        return images, found if self._numbers else found.softmax(dim=-1)

    @torch.no_grad()
    def box(self) -> None:
        """Clip to the pixels that exist."""
        inputs = self.variables["inputs"]
        pixels = self._target_model.denormalise(inputs).clamp(0.0, 1.0)
        inputs.copy_(self._target_model.normalise(pixels))


class EnlargedPixels:
    """Pixels in [0, 1] of smaller images, enlarged to ``size``, with known labels.

    Parameters
    ----------
    values
        Start, ``(L, B, C, h, w)``: pixels, or their logits.
    size
        Height and width of the images.
    """

    components = ("pixels", "coarse to fine", "labels analytic")

    def __init__(
        self, values: Tensor, size: Sides, labels: Tensor, *, logits: bool = False
    ) -> None:
        start = values.detach() if logits else values.detach().clamp(0.0, 1.0)
        self.values = start.clone().requires_grad_()
        self.variables: Tensors = {"pixels": self.values}
        self._size, self._labels, self._logits = size, labels, logits

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return images at their full size, and the labels."""
        pixels = self.values.sigmoid() if self._logits else self.values
        return resized(pixels, self._size), self._labels

    @torch.no_grad()
    def box(self) -> None:
        """Clip pixels to [0, 1]."""
        self.values.clamp_(0.0, 1.0)


def resized(values: Tensor, sides: Sides) -> Tensor:
    """Return ``(L, B, C, h, w)`` at another height and width, bilinear."""
    if values.shape[-2:] == sides:
        return values
    flat = F.interpolate(values.flatten(0, 1), sides, mode="bilinear", align_corners=False)
    return flat.view(*values.shape[:3], *sides)


def parts_of(sides: Sides, least: int) -> list[Sides]:
    """Return a quarter and half of the sides, where the shorter one has ``least`` pixels left."""
    parts = [(sides[0] // by, sides[1] // by) for by in (4, 2)]
    return [part for part in parts if min(part) >= least]
