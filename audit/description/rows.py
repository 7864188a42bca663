"""Guess the schema of a table from what consenting clients kept of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bract.config.table import MOST_COLUMNS, Column, TableSchema, Target
from bract.errors import BractError

FEW = 64
"""Most categories of one column that are recognised by their one-hot features."""


def guess_schema(
    inputs: Sequence[Tensor], targets: Sequence[Tensor], *, outputs: int | None
) -> TableSchema:
    """Return a schema by which a model sees the kept rows as they are.

    Neighbouring features of which exactly one is 1, and the others 0, in every row are the
    categories of one column. Any other feature is a number in the units that the model sees, with
    the range of the kept rows, right within a tenth of its standard deviation.

    Parameters
    ----------
    inputs
        Model inputs ``(N, features)``, finite floats, one tensor a client and round.
    targets
        ``(N,)``: whole numbers of type int64 are classes, floats a number, or, where all are 0
        or 1, the second of two classes.
    outputs
        Outputs of the model, where its last layer shows them: there are at least as many classes.

    Raises
    ------
    BractError
        If the rows differ in width, have too many features, or are not finite.
    """
    widths = {rows.shape[1] for rows in inputs}
    if len(widths) != 1 or not 1 <= min(widths) <= MOST_COLUMNS:
        raise BractError(
            f"clients kept rows of {', '.join(map(str, sorted(widths)))} features; expected the "
            f"same number everywhere, at most {MOST_COLUMNS}",
            code="truth-unusable",
        )
    rows = torch.cat([part.double() for part in inputs])
    goal = torch.cat([part.double() for part in targets])
    if not bool(rows.isfinite().all() and goal.isfinite().all()):
        raise BractError(
            "clients kept rows that hold values that are not finite", code="truth-unusable"
        )
    columns: list[Column] = []
    at = 0
    while at < rows.shape[1]:
        width = _one_hot(rows, at)
        if width:
            names = tuple(str(k + 1) for k in range(width))
            columns.append(
                Column(f"features {at + 1} to {at + width}", "categorical", categories=names)
            )
        else:
            columns.append(_number(f"feature {at + 1}", rows[:, at]))
        at += max(width, 1)
    whole = not targets[0].is_floating_point()
    return TableSchema(tuple(columns), _target(goal, whole, outputs), "private")


def _one_hot(rows: Tensor, at: int) -> int:
    """Return how many features from `at` on make one column of categories, 0 for none."""
    taken = torch.zeros(len(rows), dtype=rows.dtype)
    for width in range(1, min(FEW, rows.shape[1] - at) + 1):
        feature = rows[:, at + width - 1]
        taken = taken + feature
        if not bool(((feature == 0) | (feature == 1)).all()) or float(taken.max()) > 1:
            return 0
        if width > 1 and float(taken.min()) == 1:
            return width
    return 0


def _number(name: str, values: Tensor) -> Column:
    low, high = float(values.min()), float(values.max())
    spread = float(values.std(unbiased=False))
    if low == high:
        low, high, spread = low - 1.0, high + 1.0, 1.0
    return Column(name, "continuous", low=low, high=high, mean=0.0, std=1.0, tolerance=spread / 10)


def _target(values: Tensor, whole: bool, outputs: int | None) -> Target:
    if whole:
        count = max(int(values.max()) + 1, outputs or 2, 2)
        return Target("target", tuple(map(str, range(count))))
    if bool(((values == 0) | (values == 1)).all()):
        return Target("target", ("0", "1"), loss="binary_cross_entropy_logits")
    spread = float(values.std(unbiased=False)) if len(values) > 1 else 0.0
    return Target("target", loss="mse", tolerance=spread / 10)
