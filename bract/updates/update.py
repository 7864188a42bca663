"""Updates: what a client sends, and what the server does with it.

An update is a mapping from parameter names to tensors that points *against* the direction of
travel: ``w_global - w_local`` for local training, or one batch's gradient. The server applies
``w <- w - server_lr * sum_i p_i update_i``. This sign convention is stated here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]

STEP_COUNTERS = frozenset({"num_batches_tracked"})
"""Last parts of the names of buffers that count steps: all that no value of the data changes."""


def counts_steps(name: str, dtype: object, shape: Iterable[int]) -> bool:
    """Return whether a buffer is one whole number that counts steps.

    Every other buffer may hold statistics of the data, in whole numbers too, which no defense
    covers.
    """
    whole = "int" in str(dtype) and not list(shape)
    return name.rpartition(".")[2] in STEP_COUNTERS and whole


def parameters_of(model: nn.Module) -> Tensors:
    """Return detached CPU copies of the trainable parameters, by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> Tensors:
    """Return detached CPU copies of the buffers that a state dict holds, by name.

    A tied parameter (`bract.updates.ties`) is none under any of its names.
    """
    trainable = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value.detach().cpu().clone()
        for name, value in model.state_dict().items()
        if name not in trainable
    }


def difference(sent: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> Tensors:
    """Return ``sent - local`` for every name of ``sent``: the update of local training.

    Differences of truth values are integers.
    """
    return {name: _number(sent[name]) - _number(local[name]) for name in sent}


def apply_update(
    parameters: Mapping[str, Tensor], update: Mapping[str, Tensor], lr: float
) -> Tensors:
    """Return ``parameters - lr * update``, in the dtype of the parameters."""
    return {
        name: (value - lr * update[name].to(value.device)).to(value.dtype)
        for name, value in parameters.items()
    }


def weighted_sum(
    updates: Iterable[Mapping[str, Tensor]],
    weights: Iterable[float],
    dtype: torch.dtype | None = None,
) -> Tensors:
    """Return ``sum_i weights[i] * updates[i]``, accumulated in float64 tensor by tensor.

    The result has ``dtype``, or else the dtypes of the first update that holds the tensor. Both
    iterables have the same, positive length.
    """
    parts = list(zip(updates, weights, strict=True))
    names = dict.fromkeys(name for update, _ in parts for name in update)
    return {
        name: _weighted(((u[name], weight) for u, weight in parts if name in u), dtype)
        for name in names
    }


def _weighted(terms: Iterable[tuple[Tensor, float]], dtype: torch.dtype | None) -> Tensor:
    total = None
    for value, weight in terms:
        dtype = dtype or value.dtype
        term = value.to(torch.float64) * weight
        total = term if total is None else total.add_(term)
    assert total is not None and dtype is not None
    return total.to(dtype)


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all tensors, in their order, to one vector ``(D,)``."""
    return torch.cat([value.reshape(-1) for value in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Cut a vector ``(D,)`` into tensors with the names, shapes and dtypes of ``like``."""
    sizes = [value.numel() for value in like.values()]
    parts = torch.split(vector, sizes)
    return {
        name: part.reshape(value.shape).to(value.dtype)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


def _number(value: Tensor) -> Tensor:
    return value.to(torch.int64) if value.dtype == torch.bool else value


def numbered(names: Collection[str]) -> bool:
    """Return whether names are those that a list of arrays is given."""
    return bool(names) and all(name.isdecimal() for name in names)
