"""Tables: rows of features ``(features, 1, 1)`` in [0, 1], encoded by a schema."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.config.table import TableSchema
from bract.data import Source
from bract.data.rows import decode, project
from bract.data.views import data_spec
from bract.disk.files import write_text
from bract.errors import BractError, shown
from bract.inputs.base import INPUTS, Input, References, Truth
from bract.inputs.image import KeptReference, Reference, each_once
from bract.schema import ClientDeclaration
from bract.schema.inputs import TableOutline

_ROUNDING = 1e-3
"""By how much features may exceed [0, 1] for the rounding of the declared statistics."""


NO_SCHEMA = (
    "the client declares the input table and no schema; declare it (data.table, or input.table of "
    "bract.yaml): without it no row can be read"
)


@INPUTS.register("table")
@dataclass(frozen=True)
class Table(TableOutline, Input):
    """Rows of a table, with classes or numbers as targets.

    Parameters
    ----------
    schema
        As the client declares it; None reads no truth and shows no row.
    """

    is_described = True
    suffix = ".csv"

    schema: TableSchema | None = None

    @classmethod
    def declared(cls, declaration: ClientDeclaration) -> Self:
        """Return the table with the declared schema."""
        return cls(declaration.table)

    def unreadable(self, declaration: ClientDeclaration) -> str | None:
        """Return why no row can be read: no schema, or one of other features than declared."""
        if self.schema is None:
            return NO_SCHEMA
        shape = declaration.image_shape
        if shape is not None and shape != self.schema.shape:
            return (
                f"the client declares the input table, whose schema makes {self.schema.width} "
                f"features, and inputs of {list(shape)}; declare what the clients train on"
            )
        return None

    def examples(self, batch: object) -> tuple[Tensor, Tensor] | None:
        """Return float rows ``(B, features)`` and targets ``(B,)`` of a batch.

        Targets of whole numbers are classes; float ones may be ``(B, 1)``.
        """
        if not isinstance(batch, Mapping | tuple | list):
            return None
        parts = batch.values() if isinstance(batch, Mapping) else batch
        tensors = [part.detach().cpu() for part in parts if isinstance(part, Tensor)]
        rows = [t for t in tensors if t.dim() == 2 and t.is_floating_point() and len(t)]
        if not rows:
            return None
        others = [t for t in tensors if t is not rows[0] and t.shape[0] == len(rows[0])]
        targets = [t.flatten() for t in others if t.dim() == 1 or t.shape[1:] == (1,)]
        if not targets:
            return None
        exact = targets[0].float() if targets[0].is_floating_point() else targets[0].long()
        return rows[0].float().contiguous(), exact

    def read(self, kept: Mapping[str, Tensor], declaration: ClientDeclaration) -> Truth:
        """Return the rows that a client kept, whose file may come from another party."""
        schema = self.of_schema()
        if "inputs" in kept:
            rows = _features(kept["inputs"], schema, declaration)
        else:
            rows = kept["images"]
        shape = (schema.width, 1, 1)
        if rows.dtype != torch.float32 or rows.dim() != 4 or not len(rows):
            raise BractError(
                f"rows are {rows.dtype} {tuple(rows.shape)}, expected (N, D, 1, 1)",
                code="data-shape",
            )
        if tuple(rows.shape[1:]) != shape:
            raise BractError(
                f"rows have {rows.shape[1]} features, the declared schema makes {schema.width}",
                code="data-shape",
            )
        if not bool(((rows >= 0.0) & (rows <= 1.0)).all()):
            raise BractError("features are outside of [0, 1]", code="data-value")
        return Truth(rows, _targets(kept["labels"], schema, len(rows)))

    def attributes(self, examples: Tensor) -> dict[str, Tensor]:
        """Return the categories of every categorical column."""
        flat = examples.flatten(1)
        return {
            column.name: flat[:, place].argmax(1)
            for column, place in self.of_schema().groups()
            if column.one_hot
        }

    def fitted(self, data: DataConfig, declaration: ClientDeclaration) -> DataConfig:
        """Return the section with the declared schema."""
        return data.model_copy(update={"table": declaration.table, "input": self.name})

    def references(self, data: DataConfig, seed: int) -> References:
        """Return rows of the test split."""
        return RowReference(data, seed)

    def kept_references(self, truths: Iterable[Truth], seed: int) -> References | None:
        """Return the rows that clients kept, each once."""
        kept = each_once(truths)
        return None if kept is None else KeptRows(*kept, seed, self.of_schema())

    def save(self, example: Tensor, beside: Path, index: int, role: str) -> str:
        """Write a CSV of the column names and the row's values."""
        schema = self.of_schema()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(schema.names)
        writer.writerow(["" if cell is None else cell for cell in decode(schema, example)])
        path = beside.with_name(f"{beside.stem}--{index:02d}-{role}{self.suffix}")
        return write_text(path, text.getvalue()).name

    @classmethod
    def check_saved(cls, name: str, content: bytes) -> None:
        """Refuse what is no CSV of two lines with as many cells."""
        try:
            lines = list(csv.reader(io.StringIO(content.decode("utf-8"))))
        except (UnicodeDecodeError, csv.Error) as error:
            raise BractError(
                f"{name} is no CSV of a row: {shown(str(error))}", code="file-damaged"
            ) from error
        if len(lines) != 2 or len(lines[0]) != len(lines[1]):
            raise BractError(
                f"{name} is no CSV of a row: expected a header and one line", code="file-damaged"
            )

    def of_schema(self) -> TableSchema:
        """Return the declared schema; a `BractError` where there is none."""
        if self.schema is None:
            raise BractError(NO_SCHEMA, code="declaration-lacks")
        return self.schema


class RowReference(Reference):
    """Rows of the test split; of a target that is a number, all are of one class."""

    def of_class(self, label: int) -> Tensor:
        """Return rows with this label, ``(M, features, 1, 1)``."""
        return super().of_class(0 if self._values else label)

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean of numbers and the mode of categories of each label's rows."""
        labels = torch.zeros(len(wanted)) if self._values else wanted
        means = super().class_mean(labels)
        return project(self._schema, means.flatten(1))[:, :, None, None]

    def baselines(self, labels: Tensor, count: int, *, seed: int) -> dict[str, Tensor]:
        """Return mode and mean of each label in turn, and rows drawn at random."""
        wanted = labels[torch.arange(count) % len(labels)]
        return {
            "mode_and_mean": self.class_mean(wanted),
            "random_row": self.random_image(count, seed=seed),
        }

    @cached_property
    def _source(self) -> Source:
        found = super()._source
        if not self._values:
            return found
        # Numbers are not classes: every row is of class 0.
        return replace(found, labels=torch.zeros(len(found.labels), dtype=torch.int64))

    @cached_property
    def _schema(self) -> TableSchema:
        found = data_spec(self.data).table
        assert found is not None
        return found

    @property
    def _values(self) -> bool:
        return not self._schema.target.categories


class KeptRows(RowReference, KeptReference):
    """Rows that clients kept, without those of one client's update."""

    def __init__(self, rows: Tensor, labels: Tensor, seed: int, schema: TableSchema) -> None:
        KeptReference.__init__(self, rows, labels.long(), seed)
        self._schema = schema

    def _holding(self, images: Tensor, labels: Tensor) -> Self:
        return type(self)(images, labels, self.seed, self._schema)


def _features(inputs: Tensor, schema: TableSchema, declaration: ClientDeclaration) -> Tensor:
    """Return features in [0, 1] of model inputs ``(N, features)``."""
    flat = inputs.flatten(1)
    if inputs.dtype != torch.float32 or flat.shape[1] != schema.width:
        raise BractError(
            f"inputs are {inputs.dtype} {tuple(inputs.shape)}, expected rows of {schema.width} "
            "features; declare the schema that the client encodes with",
            code="data-shape",
        )
    mean, std = (
        torch.tensor(given or usual)
        for given, usual in zip(
            (declaration.mean, declaration.std), schema.feature_moments(), strict=True
        )
    )
    rows = flat * std + mean
    low, high = rows.min(dim=0).values, rows.max(dim=0).values
    outside = ((low < -_ROUNDING) | (high > 1 + _ROUNDING)).nonzero().flatten().tolist()
    if outside:
        name = next(
            c.name for c, place in schema.groups() if place.start <= outside[0] < place.stop
        )
        raise BractError(
            f"the client's inputs are outside the declared range of the column {name!r}; correct "
            "its low and high, or its mean and std",
            code="data-value",
        )
    return rows.clamp(0.0, 1.0)[:, :, None, None].contiguous()


def _targets(labels: Tensor, schema: TableSchema, count: int) -> Tensor:
    """Check targets, and return classes as int64 or numbers as float32."""
    target = schema.target
    classes = bool(target.categories) and not target.binary
    if labels.shape != (count,) or labels.is_floating_point() == classes:
        kind = "classes, int64" if classes else "numbers, float32"
        raise BractError(
            f"targets are {labels.dtype} {tuple(labels.shape)}, expected {count} {kind}",
            code="data-shape",
        )
    if classes and not bool(((labels >= 0) & (labels < len(target.categories))).all()):
        raise BractError(f"targets are outside 0..{len(target.categories) - 1}", code="data-value")
    if not classes and not bool(labels.isfinite().all()):
        raise BractError("targets hold values that are not finite", code="data-value")
    return labels.to(torch.int64 if classes else torch.float32)
