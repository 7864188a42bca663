"""Updates at half the bytes: float32 tensors rounded to float16 or bfloat16, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from bract.config.capture import Dtype
from bract.schema.capture import Rounding
from bract.updates.update import Tensors

WORST = 0.01
"""Share of a tensor's norm that rounding may change. float16 rounds by at most 0.0005 and
bfloat16 by at most 0.004, but for values below 6e-5, which float16 holds with fewer digits or not
at all."""

_DTYPES: dict[Literal["float16", "bfloat16"], torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def rounded(update: Mapping[str, Tensor], dtype: Dtype) -> tuple[Tensors, Rounding | None]:
    """Round the float32 tensors of an update; return them, and what that lost.

    A tensor stays as it is where one of its values would overflow or is not finite, or rounding
    would change it by more than `WORST` of its Euclidean norm.

    Parameters
    ----------
    dtype
        ``float32`` rounds nothing, whatever the tensors are; the loss is then None.
    """
    if dtype == "float32":
        return dict(update), None
    found: Tensors = {}
    kept = []
    change, norm, saved = 0.0, 0.0, 0
    for name, value in update.items():
        low = value.to(_DTYPES[dtype]) if value.dtype == torch.float32 else value
        mine, lost = _square(value), _square(low.to(value.dtype) - value)
        norm += mine
        if low.dtype == value.dtype or not lost <= WORST**2 * mine:
            found[name] = value
            kept.append(name)
            continue
        found[name] = low
        change += lost
        saved += low.numel() * (value.element_size() - low.element_size())
    if not saved:
        return found, None
    error = (change / norm) ** 0.5 if 0.0 < norm < float("inf") else 0.0
    return found, Rounding(dtype=dtype, error=error, saved=saved, kept=tuple(kept))


def sent_rounded(
    update: Mapping[str, Tensor], parameters: Mapping[str, Tensor], agreed: str
) -> Rounding | None:
    """Return how a client rounded the update that it sent, which its dtypes show.

    Parameters
    ----------
    agreed
        The run's ``training.update_dtype``. A client alone cannot choose that it rounds: what it
        sends in another dtype is for `unagreed_widened`.
    """
    for dtype, low in _DTYPES.items():
        came = {name for name in _narrow(update, parameters) if update[name].dtype == low}
        if dtype == agreed and came:
            kept = tuple(name for name in update if name not in came)
            return Rounding(dtype=dtype, error=None, saved=0, kept=kept, by="client")
    return None


def unagreed_widened(
    update: Mapping[str, Tensor], parameters: Mapping[str, Tensor], agreed: str
) -> tuple[Tensors, list[str]]:
    """Return an update, in float32 where it came in 16 bits unasked, and the names of these."""
    asked = {low for dtype, low in _DTYPES.items() if dtype == agreed}
    names = [name for name in _narrow(update, parameters) if update[name].dtype not in asked]
    return dict(update) | {name: update[name].float() for name in names}, names


def _narrow(update: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of float32 parameters whose update is of 16 bits."""
    return [
        name
        for name, value in update.items()
        if value.dtype in _DTYPES.values()
        and name in parameters
        and parameters[name].dtype == torch.float32
    ]


def widened(update: Mapping[str, Tensor], loss: Rounding | None) -> Tensors:
    """Return a stored update in float32 where it was rounded from it."""
    if loss is None:
        return dict(update)
    kept = frozenset(loss.kept)
    low = _DTYPES[loss.dtype]
    return {
        name: value.float() if value.dtype == low and name not in kept else value
        for name, value in update.items()
    }


def _square(value: Tensor) -> float:
    """Return the squared norm; NaN or infinite where a value is."""
    if not value.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2
