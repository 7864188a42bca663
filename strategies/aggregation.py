"""Combine updates into the next global model: one linear combination with public weights.

Both steps of FedBoosting that touch updates, fusing and aggregating, are `aggregate` with other
weights, so a strategy that holds ciphertexts replaces this one function.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bract.errors import BractError, one_line
from bract.protocol.records import Contribution
from bract.updates.shares import example_shares
from bract.updates.update import Tensors, apply_update, weighted_sum

_log = logging.getLogger(__name__)


def fedavg_weights(
    contributions: Sequence[Contribution], weighting: str, max_share: float = 1.0
) -> list[float]:
    """Return p_i over the clients that answered: by examples, or ``uniform``; they sum to 1.

    Parameters
    ----------
    max_share
        Largest weight of one client among three or more; see `example_shares`. How many examples
        it has is a client's own word.
    """
    if weighting == "uniform":
        return [1.0 / len(contributions)] * len(contributions)
    examples = [c.num_examples for c in contributions]
    shares, limited = example_shares(examples), example_shares(examples, max_share)
    for contribution, share, limit in zip(contributions, shares, limited, strict=True):
        if limit < share:
            _log.warning(
                "%s claims %d of %d examples, a weight of %.3f; it gets %.3f (strategy.max_share)",
                contribution.client,
                contribution.num_examples,
                sum(examples),
                share,
                limit,
            )
    return limited


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
    The fixed weights form an invertible matrix that any client can compute, so a client that holds
    all N fused models can solve for every other client's update. Random weights that stay at the
    server prevent the solving, but each model is still at least p̂ one client's own.
    """
    if not 0.5 < p_hat <= 1.0:
        raise BractError(
            f"p_hat: found {p_hat}; expected a share above 0.5 and at most 1", code="config-value"
        )
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
    integer ones rounded. A tensor that is a parameter to some clients and a buffer to others
    becomes the mean of what each makes of it alone, ``w - server_lr * update_i`` or ``buffer_i``.

    Parameters
    ----------
    arrays
        The global parameters and buffers that were sent, by name.
    contributions, weights
        The answers and their weights p_i, of one length.
    """
    return dict(aggregated(arrays, contributions, weights, server_lr))


def aggregated(
    arrays: Mapping[str, Tensor],
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    server_lr: float,
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `aggregate` returns, tensor by tensor: no second model is in memory."""
    for contribution in contributions:
        try:
            _check_shapes(arrays, contribution)
        except BractError as error:
            raise BractError(f"{contribution.client} {error}", code=error.code) from error
    for name, value in arrays.items():
        if all(name in c.update for c in contributions):
            wide = value.dtype if value.is_floating_point() else None  # of updates of 16 bits too
            step = weighted_sum([{name: c.update[name]} for c in contributions], weights, wide)
            yield name, apply_update({name: value}, step, server_lr)[name]
        else:
            held = [{name: _alone(name, value, c, server_lr)} for c in contributions]
            mean = weighted_sum(held, weights)[name]
            yield name, (mean if value.is_floating_point() else mean.round()).to(value.dtype)


def _alone(name: str, sent: Tensor, contribution: Contribution, server_lr: float) -> Tensor:
    """Return what one client would make of a tensor, in float64."""
    if name in contribution.buffers:
        return contribution.buffers[name].double()
    step = {name: contribution.update[name].double()}
    return apply_update({name: sent.double()}, step, server_lr)[name]


def check_contribution(
    arrays: Mapping[str, Tensor],
    contribution: Contribution,
    server_lr: float = 1.0,
    update_dtype: str = "float32",
) -> None:
    """Refuse an answer that would spoil the sum.

    One NaN in one update makes the sum NaN whatever its weight, 0 included. Where every client's
    own model ``w - server_lr * update_i`` is finite, so is the mean of them.

    Parameters
    ----------
    update_dtype
        In which an update of float32 parameters may come, too.

    Raises
    ------
    BractError
        If tensors are missing, too many, of another shape or dtype than was sent, or a value, or
        the model that the update alone would make, is not finite.
    """
    _check_shapes(arrays, contribution)
    low = getattr(torch, update_dtype)
    for name, value in (contribution.update | contribution.buffers).items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BractError(
                f"sent NaN or infinite values in {name}; its local training has diverged, "
                "lower training.lr or local_epochs",
                code="update-refused",
            )
        agreed = name in contribution.update and value.dtype == low
        if agreed and arrays[name].dtype == torch.float32:
            continue
        if name in arrays and value.dtype != arrays[name].dtype:
            raise BractError(
                f"sent {name} as {value.dtype}, expected {arrays[name].dtype}",
                code="update-refused",
            )
    for name, step in contribution.update.items():
        wide = step.float() if step.dtype == low else step
        value = apply_update({name: arrays[name]}, {name: wide}, server_lr)[name]
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BractError(
                f"sent an update of {name} that makes the model infinite (largest value "
                f"{float(contribution.update[name].abs().max()):.3g})",
                code="update-refused",
            )


def _check_shapes(arrays: Mapping[str, Tensor], contribution: Contribution) -> None:
    for name in contribution.update:
        if name not in arrays:
            raise BractError(
                f"sent an update for {one_line(repr(name), 100)}, not in the model",
                code="update-refused",
            )
    if both := sorted(contribution.update.keys() & contribution.buffers.keys()):
        raise BractError(
            f"sent {one_line(repr(both[0]), 100)} as an update and as a buffer",
            code="update-refused",
        )
    for name, value in (contribution.update | contribution.buffers).items():
        if name in arrays and value.shape != arrays[name].shape:
            raise BractError(
                f"sent {name!r} as {tuple(value.shape)}, expected {tuple(arrays[name].shape)}",
                code="update-refused",
            )
    missing = [name for name in arrays if name not in contribution.update | contribution.buffers]
    if missing:
        raise BractError(f"sent nothing for {', '.join(missing[:5])}", code="update-refused")
