"""Tables: rows of features ``(features, 1, 1)`` in [0, 1], encoded by a schema."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.config.table import TableSchema
from bract.data.rows import decode, project
from bract.errors import BractError, shown
from bract.inputs.base import INPUTS, References, Truth
from bract.inputs.by_schema import ROUNDING, InputBySchema, KeptBySchema, ReferenceBySchema, moments
from bract.schema import ClientDeclaration
from bract.schema.inputs import TableOutline


@INPUTS.register("table")
@dataclass(frozen=True)
class Table(TableOutline, InputBySchema[TableSchema]):
    """Rows of a table, with classes or numbers as targets."""

    suffix = ".csv"

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

    def references(self, data: DataConfig, seed: int) -> References:
        """Return rows of the test split."""
        return RowReference(data, seed)

    @staticmethod
    def references_of(
        examples: Tensor, labels: Tensor, seed: int, schema: TableSchema
    ) -> References:
        """Return rows that clients kept."""
        return KeptRows(examples, labels, seed, schema)

    @staticmethod
    def extent(schema: TableSchema) -> str:
        """Return in words how many features a row has."""
        return f"the schema of rows makes {schema.width} features"

    def save(self, example: Tensor, beside: Path, index: int, role: str) -> str:
        """Write a CSV of the column names and the row's values."""
        schema = self.of_schema()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(schema.names)
        writer.writerow(["" if cell is None else cell for cell in decode(schema, example)])
        return self._write(text.getvalue(), beside, index, role)

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


class RowReference(ReferenceBySchema[TableSchema]):
    """Rows of the test split; of a target that is a number, all are of one class."""

    kind = Table.name
    mean_name, random_name = "mode_and_mean", "random_row"

    @property
    def one_class(self) -> bool:
        """Return whether the target is a number."""
        return not self.schema.target.categories

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean of numbers and the mode of categories of each label's rows."""
        means = super().class_mean(wanted)
        return project(self.schema, means.flatten(1))[:, :, None, None]


class KeptRows(RowReference, KeptBySchema[TableSchema]):
    """Rows that clients kept, without those of one client's update."""


def _features(inputs: Tensor, schema: TableSchema, declaration: ClientDeclaration) -> Tensor:
    """Return features in [0, 1] of model inputs ``(N, features)``."""
    flat = inputs.flatten(1)
    if inputs.dtype != torch.float32 or flat.shape[1] != schema.width:
        raise BractError(
            f"inputs are {inputs.dtype} {tuple(inputs.shape)}, expected rows of {schema.width} "
            "features; declare the schema that the client encodes with",
            code="data-shape",
        )
    mean, std = moments(declaration, schema)
    rows = flat * std + mean
    low, high = rows.min(dim=0).values, rows.max(dim=0).values
    outside = ((low < -ROUNDING) | (high > 1 + ROUNDING)).nonzero().flatten().tolist()
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
