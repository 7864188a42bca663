"""Pool an ensemble of reconstructed rows, and measure how far its members agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.config.table import Column, TableSchema

KEPT = 0.5
"""Share of the members, those of the lowest loss, that are pooled."""


@dataclass(frozen=True)
class Pool:
    """What an ensemble agrees on.

    Attributes
    ----------
    rows, labels
        ``(B, features)`` and ``(B, K)``.
    certainty
        ``(B, columns)`` in [0, 1]: one minus the entropy of the members' values over its most.
    best
        Index of the member with the lowest loss.
    """

    rows: Tensor
    labels: Tensor
    certainty: Tensor
    best: int


def pooled(schema: TableSchema, rows: Tensor, labels: Tensor, losses: Tensor) -> Pool:
    """Pool the rows ``(E, B, features)`` of E members.

    The order of a batch is arbitrary, so each member's rows are assigned to those of the best
    member, by the least sum of distances (Vero et al. 2023, section 4.2).
    """
    ranked = losses.argsort().tolist()
    kept = ranked[: max(1, math.ceil(KEPT * len(ranked)))]
    best = kept[0]
    paired = [_paired(rows[member], rows[best]) for member in kept]
    together = torch.stack([rows[m][order] for m, order in zip(kept, paired, strict=True)])
    named = torch.stack([labels[m][order] for m, order in zip(kept, paired, strict=True)])
    parts, certainties = [], []
    for column, place in schema.groups():
        part = together[..., place]
        middle = part.mean(dim=0) if column.one_hot else part.median(dim=0).values
        parts.append(middle)
        certainties.append(_agreement(column, part, middle))
    return Pool(
        torch.cat(parts, dim=-1), named.median(dim=0).values, torch.stack(certainties, -1), best
    )


def _paired(rows: Tensor, others: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(others.double(), rows.double()).cpu().numpy()
    return torch.from_numpy(linear_sum_assignment(cost)[1]).to(rows.device)


def _agreement(column: Column, members: Tensor, middle: Tensor) -> Tensor:
    """Return one minus the relative entropy of values ``(E, B, width)``, ``(B,)``.

    Of categories it is that of the mean probabilities. Numbers are counted in steps of twice the
    tolerance around the pooled one.
    """
    if column.one_hot:
        shares = middle.clamp_min(1e-12)
        entropy = -(shares * shares.log()).sum(dim=-1)
        return (1.0 - entropy / math.log(column.width)).clamp(0.0, 1.0)
    count = len(members)
    if count == 1:
        return torch.ones_like(middle[..., 0])
    low, high = column.range
    step = 2 * column.most_apart / (high - low) if column.is_number else 1.0 / max(high - low, 1.0)
    bins = ((members[..., 0] - middle[..., 0]) / max(step, 1e-9)).round()
    alike = (bins[:, None] == bins[None]).double().mean(dim=1)
    entropy = -alike.log().mean(dim=0)
    return (1.0 - entropy / math.log(count)).clamp(0.0, 1.0).to(middle)
