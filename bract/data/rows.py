"""Rows of a table and their features in [0, 1]: encoding, decoding, and checks by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bract.config.table import MISSING, Column, TableSchema
from bract.errors import BractError, shown

_log = logging.getLogger(__name__)

Cell = float | str | None
"""A value of a row: a number, a category, or None where it is missing."""

_ABSENT = frozenset({"", "na", "nan", "n/a", "null", "?"})


def encode(schema: TableSchema, table: Mapping[str, Sequence[Any]], *, source: str) -> Tensor:
    """Return features float32 ``(N, width)`` in [0, 1]; see `TableSchema`.

    Parameters
    ----------
    table
        Values of each column by its name.
    source
        Names the table in errors.

    Raises
    ------
    BractError
        If a column is missing, a category is not in the schema, a number cannot be read, or a
        value is missing where the schema allows none. It names the column and the row.
    """
    if lacking := [name for name in schema.names if name not in table]:
        raise BractError(
            f"{source}: has no column {shown(lacking[0])}; found "
            f"{', '.join(map(shown, list(table)[:20]))}; add it, or take it out of data.table",
            code="data-column",
        )
    parts = [_encoded(column, table[column.name], source) for column in schema.columns]
    return torch.cat(parts, dim=1)


def encode_target(schema: TableSchema, values: Sequence[Any], *, source: str) -> Tensor:
    """Return int64 classes ``(N,)``, or float32 standardised numbers ``(N,)``."""
    target = schema.target
    places = {category: i for i, category in enumerate(target.categories)}
    found: list[float] = []
    for row, value in enumerate(values):
        text = cell_text(value)
        if text is None:
            raise BractError(
                f"{source}: row {row + 1} has no value of the target {shown(target.name)}; leave "
                "rows without a target out",
                code="data-value",
            )
        if places:
            if text not in places:
                raise _unseen(source, target.name, row, text, target.categories)
            found.append(places[text])
        else:
            found.append((_number(text, target.name, row, source) - target.mean) / target.std)
    whole = bool(places) and not target.binary
    return torch.tensor(found, dtype=torch.int64 if whole else torch.float32)


def decode(schema: TableSchema, features: Tensor) -> list[Cell]:
    """Return the row of features ``(width,)``: the nearest one that the schema allows."""
    flat = features.flatten().double()
    return [_decoded(column, flat[place]) for column, place in schema.groups()]


def project(schema: TableSchema, features: Tensor) -> Tensor:
    """Return features ``(..., width)`` of the nearest rows that the schema allows.

    One-hot groups have a single 1, integers and ranks are whole, numbers are in their range.
    """
    parts = []
    for column, place in schema.groups():
        part = features[..., place]
        if column.one_hot:
            hot = torch.nn.functional.one_hot(part.argmax(dim=-1), column.width)
            parts.append(hot.to(part))
            continue
        value, flags = part[..., :1].clamp(0.0, 1.0), part[..., 1:].round().clamp(0.0, 1.0)
        if column.kind != "continuous":
            low, high = column.range
            value = ((value * (high - low) + low).round() - low) / (high - low)
            value = value.clamp(0.0, 1.0)
        if column.missing:
            value = torch.where(flags > 0.5, torch.full_like(value, _unit_mean(column)), value)
        parts.append(torch.cat([value, flags], dim=-1))
    return torch.cat(parts, dim=-1)


def decode_target(schema: TableSchema, value: float) -> Cell:
    """Return a target of `encode_target` as a class or a number."""
    target = schema.target
    if target.categories:
        return target.categories[min(max(round(value), 0), len(target.categories) - 1)]
    return value * target.std + target.mean


def alike(column: Column, one: Cell, other: Cell) -> bool:
    """Return whether a recovered value counts as right: equal, or a number within the tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        # Rounding of float32 features moves a number by less than a millionth of its range.
        low, high = column.range
        return abs(one - other) <= column.most_apart + 1e-6 * (high - low)
    return one == other


def _encoded(column: Column, values: Sequence[Any], source: str) -> Tensor:
    texts = [cell_text(value) for value in values]
    for row, text in enumerate(texts):
        if text is None and not column.missing:
            raise BractError(
                f"{source}: row {row + 1} has no value of {shown(column.name)}; say missing: true "
                "for the column, or leave the row out",
                code="data-value",
            )
    if column.is_number:
        return _numbers(column, texts, source)
    places = {category: i for i, category in enumerate(column.values)}
    for row, text in enumerate(texts):
        if text is not None and text not in places:
            raise _unseen(source, column.name, row, text, column.categories)
    picks = torch.tensor([places[MISSING if text is None else text] for text in texts])
    if column.one_hot:
        return torch.nn.functional.one_hot(picks.long(), column.width).float()
    most = max(len(column.categories) - 1, 1)
    ranks = (picks.float() / most)[:, None]
    return _with_flags(column, ranks, [text is None for text in texts])


def _numbers(column: Column, texts: Sequence[str | None], source: str) -> Tensor:
    low, high = column.range
    found = [
        column.moments[0] if text is None else _number(text, column.name, row, source)
        for row, text in enumerate(texts)
    ]
    outside = sum(not low <= value <= high for value in found)
    if outside:
        _log.warning(
            "%s: %d of %d values of %s are outside %g to %g and were clipped to it",
            source,
            outside,
            len(found),
            column.name,
            low,
            high,
        )
    unit = [min(max((value - low) / (high - low), 0.0), 1.0) for value in found]
    values = torch.tensor(unit, dtype=torch.float32)[:, None]
    return _with_flags(column, values, [text is None for text in texts])


def _with_flags(column: Column, values: Tensor, absent: Sequence[bool]) -> Tensor:
    if not column.missing:
        return values
    flags = torch.tensor(absent)[:, None]
    values = torch.where(flags, torch.full_like(values, _unit_mean(column)), values)
    return torch.cat([values, flags.float()], dim=1)


def _unit_mean(column: Column) -> float:
    low, high = column.range
    return (column.moments[0] - low) / (high - low)


def _decoded(column: Column, part: Tensor) -> Cell:
    if column.one_hot:
        found = column.values[int(part.argmax())]
        return None if found == MISSING else found
    if column.missing and float(part[1]) > 0.5:
        return None
    low, high = column.range
    value = min(max(float(part[0]), 0.0), 1.0) * (high - low) + low
    if column.kind == "continuous":
        return value
    whole = round(value)
    return float(whole) if column.is_number else column.categories[whole]


def cell_text(value: Any) -> str | None:
    """Return a cell as text without surrounding spaces; None where it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = str(value).strip()
    return None if text.lower() in _ABSENT else text


def _number(text: str, name: str, row: int, source: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BractError(
            f"{source}: row {row + 1} has {shown(text)} in the column {shown(name)}, expected a "
            "number; correct the row, or declare the column categorical",
            code="data-value",
        )
    return value


def _unseen(source: str, name: str, row: int, text: str, categories: Sequence[str]) -> BractError:
    return BractError(
        f"{source}: row {row + 1} has the category {shown(text)} in the column {shown(name)}, "
        f"which data.table does not list; it lists {', '.join(map(shown, categories[:20]))}; "
        "add the category to the schema of every party, or leave the row out",
        code="data-value",
    )
