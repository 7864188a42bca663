"""Search the labels of every local step, by the last layer alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.problem.client_model import LocalTraining
from bract.attacks.problem.epoch_orders import Order
from bract.protocol.update import Tensors

_STARTS = 8
_SWEEPS = 20


def label_sequences(
    *,
    logits: Tensor,
    feature_norm: float,
    slope: Tensor,
    images: int,
    training: LocalTraining,
    initial: Tensor,
    order: Order | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Candidate label sequences of a client that took several local steps, likeliest first.

    With features that hardly differ between examples, the last layer's training is a recursion in
    the logits alone: ``z <- z - lr (|h|^2 + 1) g`` with ``g`` the mean of ``softmax(z) - y`` over
    the batch; FedProx adds ``mu (z - z_0) / (|h|^2 + 1)`` to it. Sequences are improved label by
    label until the recursion's mean bias gradient is nearest to the captured one, from several
    starts. Unlike counts from one averaged gradient this holds when a step moves the logits far.
    Steps that saturate the prediction leave several sequences about equally likely; those one
    change or one swap away from the best are returned as well.

    Parameters
    ----------
    logits
        ``(classes,)``: what the captured model predicts for typical features ``h``.
    feature_norm
        ``|h|^2``.
    slope
        ``(classes,)``: the captured bias update, scaled like a gradient.
    initial
        int64 ``(images,)``: one of the starts.
    order
        Of the images in every epoch, as `LocalTraining.order` gives it.

    Returns
    -------
    list of Tensor
        Distinct int64 ``(images,)``, at least one; entry i is the label of image i.
    """
    classes = len(slope)
    layer = _LastLayer(logits, feature_norm, slope, training, order)
    generator = torch.Generator().manual_seed(seed)
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
    distances = layer.distance(neighbours)
    found |= {
        tuple(sequence): distance
        for sequence, distance in zip(neighbours.tolist(), distances.tolist(), strict=True)
    }
    ranked = sorted(found, key=lambda labels: found[labels])
    return [torch.tensor(labels) for labels in ranked]


@dataclass(frozen=True)
class _LastLayer:
    """The recursion that the last layer's training is."""

    logits: Tensor
    feature_norm: float
    slope: Tensor
    training: LocalTraining
    order: Order | None

    def distance(self, sequences: Tensor) -> Tensor:
        """Squared distance of each sequence's mean bias gradient to the captured one, ``(M,)``."""
        count = sequences.shape[1]
        rows = torch.nn.functional.one_hot(sequences, len(self.slope)).to(self.slope)
        received = self.logits.to(self.slope).expand(len(sequences), -1)
        # How far the logits move while the bias moves by one.
        gain = self.feature_norm + 1.0

        def gradient(step: int, moved: Tensors) -> Tensors:
            taken = self.training.positions(step, count, self.order)
            logits = received + gain * moved["bias"]
            return {"bias": logits.softmax(dim=-1) - rows[:, taken].mean(dim=1)}

        start = {"bias": torch.zeros_like(received)}
        end = self.training.trajectory(start, gradient)
        found = self.training.mean_direction(start, end)["bias"]
        return (found - self.slope).square().sum(dim=1)


def _improve(sequence: Tensor, layer: _LastLayer) -> tuple[Tensor, float]:
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
