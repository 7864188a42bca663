"""How updates become the next global model: one linear combination with public weights.

Both steps of FedBoosting that touch updates, fusing and aggregating, are `aggregate` with other
weights, so a strategy that holds ciphertexts replaces this one function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
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


def fusing_weights(
    clients: int, p_hat: float, *, fusing: str = "fixed", seed: int = 0
) -> list[list[float]]:
    """Return the weights that fuse N updates to N models; row i makes model i and sums to 1.

    Parameters
    ----------
    clients
        N, at least 1. One client's model is its own: ``[[1.0]]``.
    p_hat
        The client's own share p̂ in (0.5, 1].
    fusing
        ``fixed``: Ĝ_i = p̂ g_i + (1-p̂)/(N-1) sum_{j≠i} g_j (Ren et al. 2022; thesis, eq. 4.5).
        ``random``: the text above that equation, fresh weights in every round of which the own is
        the largest; here the own share is uniform in [p̂, 1) and the rest is split over the others
        by a flat Dirichlet draw.
    seed
        Decides the random draw; the server keeps it to itself.

    Notes
    -----
    The fixed weights form an invertible matrix that anybody can write down, so a client that holds
    all N fused models can solve for every other client's update. Random weights that stay at the
    server prevent the solving, but each model is still at least p̂ one client's own.
    """
    if not 0.5 < p_hat <= 1.0:
        raise BractError(f"p_hat: found {p_hat}; expected a share above 0.5 and at most 1")
    if clients == 1:
        return [[1.0]]
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(clients):
        if fusing == "fixed":
            own, others = p_hat, np.full(clients - 1, 1.0 / (clients - 1))
        else:
            own = float(rng.uniform(p_hat, 1.0))
            others = rng.dirichlet(np.ones(clients - 1))
        rows.append([float(x) for x in np.insert((1.0 - own) * others, i, own)])
    return rows


def aggregate(
    arrays: Mapping[str, Tensor],
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    server_lr: float,
) -> Tensors:
    """Return the next global parameters and buffers.

    Parameters follow ``w - server_lr * sum_i p_i update_i``; buffers become ``sum_i p_i buffer_i``,
    integer ones rounded.

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
        _check_shapes(arrays, contribution)
    first = contributions[0]
    parameters = {name: value for name, value in arrays.items() if name in first.update}
    step = weighted_sum([c.update for c in contributions], weights)
    updated = apply_update(parameters, step, server_lr)
    averaged = weighted_sum(
        [{name: b.double() for name, b in c.buffers.items()} for c in contributions], weights
    )
    buffers = {
        name: (mean if arrays[name].is_floating_point() else mean.round()).to(arrays[name].dtype)
        for name, mean in averaged.items()
        if name in arrays
    }
    return {name: updated.get(name, buffers.get(name, value)) for name, value in arrays.items()}


def check_contribution(arrays: Mapping[str, Tensor], contribution: Contribution) -> None:
    """Refuse an answer that would spoil the sum.

    One NaN in one update makes the sum NaN whatever its weight, 0 included.

    Raises
    ------
    BractError
        If tensors are missing, too many or of another shape, or a value is not finite.
    """
    _check_shapes(arrays, contribution)
    for name, value in (contribution.update | contribution.buffers).items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BractError(
                f"sent NaN or infinite values in {name}; its local training has diverged, "
                "lower training.lr or local_epochs"
            )


def _check_shapes(arrays: Mapping[str, Tensor], contribution: Contribution) -> None:
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
