"""Targets of a batch: classes, numbers, or several labels an example."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_LABELS = ("label", "labels", "target", "targets", "y", "class")
"""Usual keys of the label in a batch that is a dictionary."""

_RECORDS = ("id", "ids", "uid", "idx", "index", "indices")
"""How keys of records' numbers end."""

_MOST_CLASSES = 1000
"""Classes of the largest usual data set; larger whole numbers are those of records."""

_ROUNDING = 1e-3
"""By how much a sum of shares may be apart from 1."""


def is_one_hot(found: Tensor) -> bool:
    """Return whether rows are each a one among zeros."""
    if found.dim() != 2 or not len(found) or not 2 <= found.shape[1] <= _MOST_CLASSES:
        return False
    return bool(((found == 0) | (found == 1)).all()) and bool((found.sum(dim=1) == 1).all())


def classes_of(tensors: Mapping[object, Tensor]) -> Tensor | None:
    """Return the classes that a batch has, int64 ``(B,)``; None where it has none, or numbers.

    A value named as a label comes first, whether it is classes or numbers; whole numbers that may
    be those of records come after all others.
    """
    whole = {k: t for k, t in tensors.items() if t.dim() == 1 and not t.is_floating_point()}
    ones = {k: t.int().argmax(dim=1) for k, t in tensors.items() if is_one_hot(t)}
    found = _named(whole) or _named(ones)
    numbers = {k: t for k, t in tensors.items() if t.is_floating_point() and t.dim() in (1, 2)}
    numbers |= _several(tensors)
    if not found and _named(numbers):
        return None
    likely = {k: t for k, t in whole.items() if not _are_records(k, t)}
    found = found or likely or ones
    if not found and numbers:
        return None
    return next(iter((found or whole).values())).long() if found or whole else None


def numbers_of(tensors: Mapping[object, Tensor], like: Tensor | None = None) -> Tensor | None:
    """Return the numbers that a batch has as targets, float32 ``(B,)`` or ``(B, values)``.

    Of two classes that are 0 and 1 they are int64. Several labels of 0 and 1, and probabilities,
    are none.

    Parameters
    ----------
    like
        An earlier target, a number or ``(values,)``: then they are such numbers, whatever they are.
    """
    found = {k: t for k, t in tensors.items() if t.is_floating_point() and t.dim() in (1, 2)}
    if like is None:
        found = {k: t for k, t in found.items() if t.shape[1:] in ((), (1,)) or not _are_shares(t)}
    else:
        shapes = ((), (1,)) if like.dim() == 0 else (like.shape,)
        found = {k: t for k, t in found.items() if t.shape[1:] in shapes}
    if not found:
        return None
    values = next(iter((_named(found) or found).values())).float()
    values = values[:, 0] if values.shape[1:] == (1,) else values
    binary = values.dim() == 1 and bool(((values == 0) | (values == 1)).all())
    return values.long() if binary and like is None else values.contiguous()


def several_of(tensors: Mapping[object, Tensor]) -> Tensor | None:
    """Return several labels of 0 and 1 an example, float32 ``(B, classes)``; None without any."""
    found = _several(tensors)
    rows = next(iter((_named(found) or found).values()), None)
    return None if rows is None else rows.float().contiguous()


def _several(tensors: Mapping[object, Tensor]) -> dict[object, Tensor]:
    """Return rows of several zeros and ones."""
    rows = {k: t for k, t in tensors.items() if t.dim() == 2 and t.shape[1] > 1 and len(t)}
    return {k: t for k, t in rows.items() if bool(((t == 0) | (t == 1)).all())}


def _are_shares(rows: Tensor) -> bool:
    """Return whether rows are of 0 and 1, or sum to 1 each."""
    binary = bool(((rows == 0) | (rows == 1)).all())
    return binary or bool(((rows.double().sum(dim=1) - 1.0).abs() < _ROUNDING).all())


def _named(found: Mapping[object, Tensor]) -> dict[object, Tensor]:
    """Return the values under a usual key of the label."""
    return {k: t for k, t in found.items() if str(k).lower() in _LABELS}


def _are_records(key: object, numbers: Tensor) -> bool:
    """Return whether whole numbers may be those of records: by their key, or as they are large."""
    last = re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", str(key))[-1].lower()
    return last in _RECORDS or bool(len(numbers) and int(numbers.max()) >= _MOST_CLASSES)
