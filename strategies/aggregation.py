"""How updates become the next global model: one linear combination with public weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bract.errors import BractError
from bract.records import Contribution
from bract.update import Tensors, apply_update, weighted_sum


def fedavg_weights(contributions: Sequence[Contribution], weighting: str) -> list[float]:
    """Return p_i over those who answered: by number of examples, or ``uniform``; they sum to 1."""
    if weighting == "uniform":
        return [1.0 / len(contributions)] * len(contributions)
    total = sum(c.num_examples for c in contributions)
    return [c.num_examples / total for c in contributions]


def aggregate(
    arrays: Mapping[str, Tensor],
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    server_lr: float,
) -> Tensors:
    """Return the next global parameters and buffers.

    Parameters follow ``w - server_lr * sum_i p_i update_i``; floating point buffers become
    ``sum_i p_i buffer_i``; integer buffers are taken from the client of the largest weight.

    Parameters
    ----------
    arrays
        The global parameters and buffers that were sent, by name.
    contributions, weights
        The answers and their weights p_i, of one length.

    Raises
    ------
    BractError
        If an update lacks a tensor, brings one that was not sent, or has another shape.
    """
    for contribution in contributions:
        _check(arrays, contribution)
    first = contributions[0]
    parameters = {name: value for name, value in arrays.items() if name in first.update}
    step = weighted_sum([c.update for c in contributions], weights)
    updated = apply_update(parameters, step, server_lr)
    leader = contributions[max(range(len(weights)), key=lambda i: weights[i])]
    averaged = weighted_sum(
        [{n: b for n, b in c.buffers.items() if b.is_floating_point()} for c in contributions],
        weights,
    )
    return {
        name: updated.get(name, averaged.get(name, leader.buffers.get(name, value)))
        for name, value in arrays.items()
    }


def _check(arrays: Mapping[str, Tensor], contribution: Contribution) -> None:
    for name, value in contribution.update.items():
        if name not in arrays:
            raise BractError(
                f"{contribution.client} sent an update for {name!r}, which is not in the model"
            )
        if value.shape != arrays[name].shape:
            raise BractError(
                f"{contribution.client} sent {name!r} as {tuple(value.shape)}, "
                f"expected {tuple(arrays[name].shape)}"
            )
    missing = [name for name in arrays if name not in contribution.update | contribution.buffers]
    if missing:
        raise BractError(f"{contribution.client} sent nothing for {', '.join(missing[:5])}")
