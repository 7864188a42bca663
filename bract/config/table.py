"""The schema of a table: its columns, how each is encoded, and the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from bract.config.work import printable_alone

MOST_COLUMNS = 2048
MOST_CATEGORIES = 1024
MISSING = "(missing)"
"""Category of a missing value."""

LossName = Literal[
    "cross_entropy", "mse", "mae", "huber", "binary_cross_entropy", "binary_cross_entropy_logits"
]


ColumnName = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(printable_alone)]
Category = Annotated[str, Field(max_length=120), AfterValidator(printable_alone)]
Categories = Annotated[tuple[Category, ...], Field(max_length=MOST_CATEGORIES)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e18, le=1e18)]
Spread = Annotated[float, Field(gt=0.0, le=1e18, allow_inf_nan=False)]

_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class Column:
    """One column of a table.

    Attributes
    ----------
    name
        As in the header of a file.
    kind
        ``continuous`` and ``integer`` are numbers, ``ordinal`` categories in an order,
        ``categorical`` categories without one.
    low, high
        Range of a number. Values outside are clipped to it by the client that reads them, and by
        an attacker.
    mean, std
        Of a number: the model sees ``(x - mean) / std``. None takes the middle and half the range.
    categories
        Every value that a categorical or ordinal column may have.
    encoder
        ``standardise`` for numbers and ordinals (by their rank), ``one-hot``, or ``embedding``: a
        row of a matrix that the model ``table-embedding`` learns. None takes the first that fits.
    missing
        Whether a value may be missing: of a number, 1 in a second feature, with the mean in the
        first; else one more category, `MISSING`.
    tolerance
        Distance up to which a recovered number counts as right, in units of the column; None
        takes a tenth of ``std``.
    public_name
        Whether a redacted report may show the column's name.
    """

    name: ColumnName
    kind: Literal["continuous", "integer", "ordinal", "categorical"] = "continuous"
    low: Finite | None = None
    high: Finite | None = None
    mean: Finite | None = None
    std: Spread | None = None
    categories: Categories = ()
    encoder: Literal["standardise", "one-hot", "embedding"] | None = None
    missing: bool = False
    tolerance: Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)] | None = None
    public_name: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Column:
        if self.is_number:
            if self.low is None or self.high is None:
                raise ValueError(f"column {self.name!r} is {self.kind} and has no low and high")
            if not self.low < self.high:
                raise ValueError(
                    f"column {self.name!r} is constant: low {self.low:g}, high {self.high:g}; "
                    "leave it out"
                )
            if self.categories or self.encoder in ("one-hot", "embedding"):
                raise ValueError(f"column {self.name!r} is {self.kind}: no categories, no one-hot")
            return self
        if len(self.categories) < 2 or len(set(self.categories)) < len(self.categories):
            raise ValueError(f"column {self.name!r} needs two or more different categories")
        if MISSING in self.categories:
            raise ValueError(f"column {self.name!r}: say missing: true, not {MISSING!r}")
        if self.encoder == "standardise" and self.kind == "categorical":
            raise ValueError(f"column {self.name!r} is categorical: one-hot or embedding")
        return self

    @property
    def is_number(self) -> bool:
        """Return whether values are numbers rather than categories."""
        return self.kind in ("continuous", "integer")

    @property
    def one_hot(self) -> bool:
        """Return whether each category has a feature of its own."""
        return not self.is_number and (self.encoder or self._usual) != "standardise"

    @property
    def embedded(self) -> bool:
        """Return whether the model looks the category up in a matrix."""
        return self.encoder == "embedding"

    @property
    def values(self) -> tuple[str, ...]:
        """Categories, a missing value included."""
        return (*self.categories, MISSING) if self.missing else self.categories

    @property
    def range(self) -> tuple[float, float]:
        """Least and greatest value; of an ordinal column its ranks."""
        if self.is_number:
            assert self.low is not None and self.high is not None
            return self.low, self.high
        return 0.0, float(len(self.categories) - 1)

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation by which values are standardised."""
        low, high = self.range
        return (
            (low + high) / 2 if self.mean is None else self.mean,
            (high - low) / 2 if self.std is None else self.std,
        )

    @property
    def width(self) -> int:
        """Features that the column makes."""
        return len(self.values) if self.one_hot else 1 + self.missing

    @property
    def most_apart(self) -> float:
        """Distance up to which a recovered number counts as right."""
        return self.moments[1] / 10 if self.tolerance is None else self.tolerance

    @property
    def _usual(self) -> str:
        return "one-hot" if self.kind == "categorical" else "standardise"


@dataclass(frozen=True, config=_CONFIG)
class Target:
    """What the model predicts: one of several classes, or a number.

    Attributes
    ----------
    categories
        The classes; empty for a number.
    mean, std
        Of a number: the model predicts ``(y - mean) / std``.
    loss
        None takes ``cross_entropy`` for classes and ``mse`` for numbers. A model of one output
        that predicts the second of two classes has one of the binary losses.
    tolerance
        As of a column.
    """

    name: ColumnName
    categories: Categories = ()
    mean: Finite = 0.0
    std: Spread = 1.0
    loss: LossName | None = None
    tolerance: Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Target:
        count = len(self.categories)
        if count == 1 or len(set(self.categories)) < count:
            raise ValueError(f"target {self.name!r} needs two or more different classes, or none")
        if self.binary and count != 2:
            raise ValueError(f"target {self.name!r}: loss {self.loss} needs two classes")
        of_classes = self.binary or self.loss == "cross_entropy"
        if self.loss is not None and of_classes != bool(count):
            kind = "a number as the target" if count else "classes"
            raise ValueError(f"target {self.name!r}: loss {self.loss} needs {kind}")
        return self

    @property
    def binary(self) -> bool:
        """Return whether one output predicts the second of two classes."""
        return self.loss is not None and self.loss.startswith("binary")

    @property
    def outputs(self) -> int:
        """Outputs of a model."""
        return 1 if self.binary or not self.categories else len(self.categories)

    @property
    def objective(self) -> LossName:
        """The loss that clients train with."""
        return self.loss or ("cross_entropy" if self.categories else "mse")

    @property
    def most_apart(self) -> float:
        """Distance up to which a recovered number counts as right."""
        return self.std / 10 if self.tolerance is None else self.tolerance


@dataclass(frozen=True, config=_CONFIG)
class TableSchema:
    """A table's columns in the order of its features, and its target.

    Every party has the same schema before training: ranges, means and categories are part of the
    protocol, so the server knows them. ``statistics`` records whether they were taken from public
    knowledge or from rows of the clients, which then reveal something of these rows already.
    """

    columns: Annotated[tuple[Column, ...], Field(min_length=1, max_length=MOST_COLUMNS)]
    target: Target
    statistics: Literal["public", "private"] = "private"

    @model_validator(mode="after")
    def _names(self) -> TableSchema:
        names = [*self.names, self.target.name]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two columns are called {twice[0]!r}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, without the target."""
        return tuple(column.name for column in self.columns)

    @property
    def width(self) -> int:
        """Features of an encoded row."""
        return sum(column.width for column in self.columns)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an encoded row, ``(features, 1, 1)``."""
        return self.width, 1, 1

    @property
    def outputs(self) -> int:
        """Outputs of a model."""
        return self.target.outputs

    @property
    def objective(self) -> LossName:
        """Name of the loss, of `bract.models.losses`."""
        return self.target.objective

    def groups(self) -> Iterator[tuple[Column, slice]]:
        """Yield each column with the place of its features."""
        at = 0
        for column in self.columns:
            yield column, slice(at, at + column.width)
            at += column.width

    def feature_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each feature, whose values are in [0, 1]."""
        means: list[float] = []
        stds: list[float] = []
        for column in self.columns:
            if column.one_hot:
                means += [0.0] * column.width
                stds += [1.0] * column.width
                continue
            low, high = column.range
            mean, std = column.moments
            means += [(mean - low) / (high - low)] + [0.0] * column.missing
            stds += [std / (high - low)] + [1.0] * column.missing
        return tuple(means), tuple(stds)
