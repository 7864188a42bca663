"""Search the labels of every local step, by the last layer alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bract.attacks.problem.client_model import LocalTraining
from bract.attacks.problem.epoch_orders import Order
from bract.models.losses import LOSSES, Loss
from bract.updates.update import Tensors

_STARTS = 8
_SWEEPS = 20
_TIED = 1e-6
_AT_ONCE = 2**22
"""Most numbers of a class that neighbouring sequences are compared by at once."""


class Layer(Protocol):
    """What the last layer shows of a sequence of labels."""

    @property
    def slope(self) -> Tensor:
        """The captured bias update, scaled like a gradient, ``(classes,)``."""

    def distance(self, sequences: Tensor) -> Tensor:
        """Return the squared distance of each sequence's mean bias direction to it, ``(M,)``."""


def label_sequences(*, layer: Layer, images: int, initial: Tensor) -> list[Tensor]:
    """Candidate label sequences of a client that took several local steps, likeliest first.

    Sequences are improved label by label until the mean bias direction that the layer predicts for
    them is nearest to the captured one, from several starts. Unlike counts from one averaged
    gradient this holds when a step moves the logits far. Steps that saturate the prediction leave
    several sequences about equally likely; those one change or one swap away from the best are
    returned as well.

    Parameters
    ----------
    initial
        int64 ``(images,)``: one of the starts.

    Returns
    -------
    list of Tensor
        Distinct int64 ``(images,)``, at least one; entry i is the label of image i.
    """
    classes = len(layer.slope)
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[int, ...], float] = {}
    for start in range(_STARTS):
        sequence = initial
        if start > _STARTS // 2:
            sequence = torch.randint(classes, (images,), generator=generator)
        elif start > 0:
            sequence = initial[torch.randperm(images, generator=generator)]
        sequence, distance = _improve(sequence, layer)
        found[tuple(sequence.tolist())] = distance
    best = torch.tensor(min(found, key=lambda labels: found[labels]))
    neighbours = _neighbours(best, classes)
    most = max(1, _AT_ONCE // classes)
    distances = torch.cat([layer.distance(part) for part in neighbours.split(most)])
    found |= {
        tuple(sequence): distance
        for sequence, distance in zip(neighbours.tolist(), distances.tolist(), strict=True)
    }
    ranked = sorted(found, key=lambda labels: found[labels])
    return [torch.tensor(labels) for labels in ranked]


@dataclass(frozen=True)
class LastLayer:
    """The last layer's training as a recursion in the logits alone.

    With features h that hardly differ between examples it is ``z <- z - lr (|h|^2 + 1) g`` with
    ``g`` the mean of ``softmax(z) - y`` over the batch; FedProx adds ``mu (z - z_0) / (|h|^2 + 1)``
    to it.

    Attributes
    ----------
    logits
        ``(classes,)``: what the captured model predicts for typical features.
    feature_norm
        ``|h|^2``.
    slope
        As `Layer.slope`.
    order
        Of the images in every epoch, as `LocalTraining.order` gives it.
    loss
        Cross entropy with its terms.
    """

    logits: Tensor
    feature_norm: float
    slope: Tensor
    training: LocalTraining
    order: Order | None
    loss: Loss = LOSSES["cross_entropy"]

    def distance(self, sequences: Tensor) -> Tensor:
        """See `Layer`."""
        count = sequences.shape[1]
        received = self.logits.to(self.slope).expand(len(sequences), -1)
        # How far the logits move while the bias moves by one.
        gain = self.feature_norm + 1.0

        def gradient(step: int, moved: Tensors) -> Tensors:
            taken = self.training.positions(step, count, self.order)
            logits = received + gain * moved["bias"]
            shares = _shares(sequences[:, taken], self.slope)
            return {"bias": self.loss.mean_slope(logits.softmax(dim=-1), shares)}

        return _distance(self.training, self.slope, received, gradient)


@dataclass(frozen=True)
class PathLayer:
    """The last layer's training with predictions that go evenly from one end to the other.

    For optimizers that normalise gradients, such as Adam, the update shows no features, and so no
    recursion; but both ends of the training are known.

    Attributes
    ----------
    first, last
        Mean predictions of the sent and of the returned model, ``(classes,)``.
    slope, training, order, loss
        As `LastLayer` has them; of long training an epoch or more, taken to be spread over the way.
    """

    first: Tensor
    last: Tensor
    slope: Tensor
    training: LocalTraining
    order: Order | None
    loss: Loss = LOSSES["cross_entropy"]

    def distance(self, sequences: Tensor) -> Tensor:
        """See `Layer`."""
        count = sequences.shape[1]

        def gradient(step: int, _: Tensors) -> Tensors:
            taken = self.training.positions(step, count, self.order)
            here = torch.lerp(self.first, self.last, step / self.training.steps)
            shares = _shares(sequences[:, taken], self.slope)
            return {"bias": self.loss.mean_slope(here, shares)}

        start = self.slope.expand(len(sequences), -1)
        found = _distance(self.training, self.slope, start, gradient)
        # A first step shows signs: sequences of equal signs differ by rounding alone.
        return found.div(_TIED).round() * _TIED


def _shares(labels: Tensor, slope: Tensor) -> Tensor:
    """Return the share of each class among the labels ``(M, b)`` of a batch, ``(M, classes)``."""
    shares = torch.zeros(len(labels), len(slope)).to(slope)
    each = torch.full(labels.shape, 1.0 / labels.shape[1]).to(slope)
    return shares.scatter_add_(1, labels, each)


def _distance(
    training: LocalTraining,
    slope: Tensor,
    like: Tensor,
    gradient: Callable[[int, Tensors], Tensors],
) -> Tensor:
    start = {"bias": torch.zeros_like(like)}
    found = training.mean_direction(start, training.trajectory(start, gradient))["bias"]
    return (found - slope).square().sum(dim=1)


def _improve(sequence: Tensor, layer: Layer) -> tuple[Tensor, float]:
    classes = len(layer.slope)
    best = layer.distance(sequence[None])[0]
    for _ in range(_SWEEPS):
        before = best
        for position in range(len(sequence)):
            candidates = sequence.repeat(classes, 1)
            candidates[:, position] = torch.arange(classes)
            distances = layer.distance(candidates)
            if float(distances.min()) < float(best):
                sequence, best = candidates[distances.argmin()], distances.min()
        if not float(best) < float(before):
            break
    return sequence, float(best)


def _neighbours(sequence: Tensor, classes: int) -> Tensor:
    """Sequences that differ in one label or in the order of two, ``(M, images)``."""
    count = len(sequence)
    changed = sequence.repeat(count * classes, 1)
    rows = torch.arange(count * classes)
    changed[rows, rows // classes] = rows % classes
    pairs = torch.combinations(torch.arange(count), 2)
    swapped = sequence.repeat(len(pairs), 1)
    rows = torch.arange(len(pairs))
    swapped[rows, pairs[:, 0]], swapped[rows, pairs[:, 1]] = (
        sequence[pairs[:, 1]],
        sequence[pairs[:, 0]],
    )
    return torch.cat([changed, swapped])
