"""Infer the schema of a table from its rows."""

from __future__ import annotations

import logging
import math
import statistics as stats
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from bract.config.table import MOST_CATEGORIES, Column, TableSchema, Target
from bract.data.rows import cell_text
from bract.errors import BractError, one_line, shown

_log = logging.getLogger(__name__)

FEW = 12
"""Most different texts of a column that is taken as categorical without being named."""


def infer_schema(
    table: Mapping[str, Sequence[Any]],
    *,
    target: str,
    categorical: Collection[str] = (),
    statistics: Literal["public", "private"] = "private",
    source: str,
    public_names: bool = False,
) -> TableSchema:
    """Infer a schema; ranges, moments and categories are those of these very rows.

    A column of numbers is continuous, of whole numbers integer, of other values categorical.
    Constant columns are left out, with a warning that names them.

    Parameters
    ----------
    target
        Name of the target's column.
    categorical
        Columns, or the target, whose numbers are codes.
    statistics
        Whether these rows are public; see `TableSchema`.

    Raises
    ------
    BractError
        If there is no such target, it lacks values, or a column holds too many categories.
    """
    if target not in table:
        raise BractError(
            f"{source}: has no column {shown(target)}; choose the target among "
            f"{', '.join(map(shown, list(table)[:30]))}",
            code="data-column",
        )
    if strange := sorted(set(categorical) - set(table)):
        raise BractError(
            f"{source}: has no column {shown(strange[0])} to take as categorical",
            code="data-column",
        )
    columns = []
    for name, values in table.items():
        if name == target:
            continue
        found = [cell_text(value) for value in values]
        if len({text for text in found if text is not None}) < 2:
            _log.warning("%s: the column %s is constant and is left out", source, name)
            continue
        try:
            columns.append(_column(name, found, name in categorical, source, public_names))
        except ValidationError as error:
            raise BractError(
                f"{source}: {one_line(error.errors()[0]['msg'], 200)}", code="data-value"
            ) from None
    if not columns:
        raise BractError(
            f"{source}: has no column besides the target whose values differ", code="data-column"
        )
    goal = _target(target, table[target], target in categorical, source)
    return TableSchema(columns=tuple(columns), target=goal, statistics=statistics)


def _column(
    name: str, texts: Sequence[str | None], coded: bool, source: str, public_name: bool
) -> Column:
    known = [text for text in texts if text is not None]
    absent = len(known) < len(texts)
    numbers = None if coded else _numbers(known)
    if numbers is None:
        return Column(
            name=name,
            kind="categorical",
            categories=_categories(name, known, source),
            missing=absent,
            public_name=public_name,
        )
    whole = all(value.is_integer() for value in numbers)
    return Column(
        name=name,
        kind="integer" if whole else "continuous",
        low=min(numbers),
        high=max(numbers),
        mean=stats.fmean(numbers),
        std=stats.pstdev(numbers),
        missing=absent,
        public_name=public_name,
    )


def _target(name: str, values: Sequence[Any], coded: bool, source: str) -> Target:
    texts = [cell_text(value) for value in values]
    absent = next((row for row, text in enumerate(texts) if text is None), None)
    if absent is not None:
        raise BractError(
            f"{source}: row {absent + 1} has no value of the target {shown(name)}; leave rows "
            "without a target out",
            code="data-value",
        )
    known = [text for text in texts if text is not None]
    numbers = None if coded else _numbers(known)
    if numbers is None or (len(set(known)) <= FEW and all(v.is_integer() for v in numbers)):
        return Target(name=name, categories=_categories(name, known, source))
    return Target(name=name, mean=stats.fmean(numbers), std=stats.pstdev(numbers))


def _numbers(texts: Sequence[str]) -> list[float] | None:
    try:
        found = [float(text) for text in texts]
    except ValueError:
        return None
    return found if all(math.isfinite(value) for value in found) else None


def _categories(name: str, texts: Sequence[str], source: str) -> tuple[str, ...]:
    found = set(texts)
    if len(found) > MOST_CATEGORIES:
        raise BractError(
            f"{source}: the column {shown(name)} has {len(found)} different values, more than "
            f"{MOST_CATEGORIES}; take it out, or group them",
            code="data-value",
        )
    numbers = _numbers(list(found))
    return tuple(sorted(found, key=float) if numbers is not None else sorted(found))
