"""Which label stood at which local step: a search over sequences by the last layer alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.simulation import LocalTraining

_STARTS = 8
_SWEEPS = 20


def label_sequences(
    *,
    logits: Tensor,
    feature_norm: float,
    slope: Tensor,
    images: int,
    training: LocalTraining,
    guess: Tensor,
    seed: int = 0,
) -> list[Tensor]:
    """Candidate label sequences of a client that took several local steps, likeliest first.

    With features that hardly differ between examples, the last layer's training is a recursion in
    the logits alone: ``z <- z - lr (|h|^2 + 1) g`` with ``g`` the mean of ``softmax(z) - y`` over
    the batch. Sequences are improved label by label until the recursion's mean bias gradient is
    nearest to the captured one, from several starts. Unlike counts from one averaged gradient
    this holds when a step moves the logits far. Steps that saturate the prediction leave several
    sequences about equally likely; those one change or one swap away from the best are returned as
    well.

    Parameters
    ----------
    logits
        ``(classes,)``: what the captured model predicts for typical features ``h``.
    feature_norm
        ``|h|^2``.
    slope
        ``(classes,)``: the captured bias update, scaled like a gradient.
    guess
        int64 ``(images,)``: one of the starts.

    Returns
    -------
    list of Tensor
        Distinct int64 ``(images,)``, at least one; entry i is the label of image i.
    """
    classes = len(slope)
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, ...], float] = {}
    for start in range(_STARTS):
        order = guess
        if start > _STARTS // 2:
            order = torch.randint(classes, (images,), generator=generator)
        elif start > 0:
            order = guess[torch.randperm(images, generator=generator)]
        order, distance = _improve(order, logits, feature_norm, slope, training)
        found[tuple(order.tolist())] = distance
    best = torch.tensor(min(found, key=lambda labels: found[labels]))
    neighbours = _neighbours(best, classes)
    distances = _distance(neighbours, logits, feature_norm, slope, training)
    found |= {
        tuple(order): distance
        for order, distance in zip(neighbours.tolist(), distances.tolist(), strict=True)
    }
    ranked = sorted(found, key=lambda labels: found[labels])
    return [torch.tensor(labels) for labels in ranked]


def _improve(
    order: Tensor, logits: Tensor, feature_norm: float, slope: Tensor, training: LocalTraining
) -> tuple[Tensor, float]:
    classes = len(slope)
    best = _distance(order[None], logits, feature_norm, slope, training)[0]
    for _ in range(_SWEEPS):
        before = best
        for position in range(len(order)):
            candidates = order.repeat(classes, 1)
            candidates[:, position] = torch.arange(classes)
            distances = _distance(candidates, logits, feature_norm, slope, training)
            if float(distances.min()) < float(best):
                order, best = candidates[distances.argmin()], distances.min()
        if not float(best) < float(before):
            break
    return order, float(best)


def _neighbours(order: Tensor, classes: int) -> Tensor:
    """Sequences that differ in one label or in the order of two, ``(M, images)``."""
    count = len(order)
    changed = order.repeat(count * classes, 1)
    rows = torch.arange(count * classes)
    changed[rows, rows // classes] = rows % classes
    pairs = torch.combinations(torch.arange(count), 2)
    swapped = order.repeat(len(pairs), 1)
    rows = torch.arange(len(pairs))
    swapped[rows, pairs[:, 0]], swapped[rows, pairs[:, 1]] = order[pairs[:, 1]], order[pairs[:, 0]]
    return torch.cat([changed, swapped])


def _distance(
    orders: Tensor, logits: Tensor, feature_norm: float, slope: Tensor, training: LocalTraining
) -> Tensor:
    """Squared distance of each sequence's mean bias gradient to the captured one, ``(M,)``."""
    count = orders.shape[1]
    rows = torch.nn.functional.one_hot(orders, len(slope)).to(slope)
    current = logits.to(slope).expand(len(orders), -1)
    velocity = torch.zeros_like(current)
    total = torch.zeros_like(current)
    for step in range(training.steps):
        taken = training.positions(step, count)
        gradient = current.softmax(dim=-1) - rows[:, taken].mean(dim=1)
        velocity = training.momentum * velocity + gradient
        total = total + velocity
        current = current - training.lr * (feature_norm + 1.0) * velocity
    return (total / training.steps - slope).square().sum(dim=1)
