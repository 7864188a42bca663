"""Score reconstructed rows of a table: features right, exact rows, calibration, retrieval.

Rows are features ``(N, D, 1, 1)`` in [0, 1]; before they are compared they become the nearest rows
that the schema allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bract.config.table import Column, TableSchema
from bract.data.rows import Cell, alike, decode, decode_target
from bract.errors import BractError
from bract.inputs import References, Truth
from bract.schema.audit import Baseline, CalibrationBin, CellResult, Scores
from bract.scores.base import ScoredImages, Scorer, beside, ranked
from bract.scores.chance import Array

BINS = 5
"""Bins of certainty in a calibration."""

_FARTHEST = 3.0
"""Standard deviations from which on two numbers are as far apart as two categories."""

_TIE = 1e-3
"""Weight of the distance beside the share of wrong features where rows are paired."""


class RowScorer(Scorer):
    """Scores rows against the originals of updates.

    Parameters
    ----------
    schema
        Of the table.
    references
        Rows that no client of the update trained on; None leaves retrieval open.
    """

    def __init__(self, schema: TableSchema, references: References | None) -> None:
        super().__init__(references)
        self.schema = schema

    def score(
        self, images: Tensor, truth: Truth, *, recovered: Tensor | None = None
    ) -> ScoredImages:
        """Pair the rows of the blind pick with the originals, and score the pairs."""
        order, kept = self._pair(images, truth.images)
        originals = truth.images[kept]
        rows = self._rows(images[order], originals)
        candidates = None if self.references is None else self.references.candidates
        identified = candidates is not None and len(images) >= len(truth.images)
        if identified and candidates is not None:
            apart = self.distances(images[order], originals).diagonal()
            others = self.distances(images[order], candidates)
            ranks = 1 + (others <= apart[:, None]).sum(dim=1)
            rows = ranked(rows, ranks.tolist())
        labels = truth.labels[kept]
        return ScoredImages(
            rows=rows,
            order=order,
            originals=originals,
            labels=labels.tolist(),
            label_accuracy=self._target_accuracy(recovered, order, labels),
            identified=identified,
            candidates=None if candidates is None else len(candidates) + 1,
        )

    def oracle(self, restarts: Sequence[Tensor], scored: ScoredImages) -> list[Scores]:
        """Score the restart with the most features right."""
        found = []
        for images in restarts:
            order, kept = self._pair(images, scored.originals)
            found.append(self._rows(images[order], scored.originals[kept]))
        return max(found, key=lambda rows: sum(row.features or 0.0 for row in rows))

    def baselines(
        self, made: Mapping[str, Tensor], scored: ScoredImages, truth: Truth, count: int
    ) -> dict[str, list[Baseline]]:
        """Score baselines as the attack was, and the nearest public row of each original.

        No attacker can choose the latter.
        """
        del count
        found = {}
        for name, images in made.items():
            if len(images) < len(scored.rows):
                continue
            order, kept = self._pair(images, truth.images)
            rows = self._rows(images[order], truth.images[kept])
            chosen = len(images) < len(truth.images)
            found[name] = beside(rows, scored.rows, _wrong_features, chosen=chosen)
        if self.references is not None:
            found["nearest_public_row"] = self._nearest(scored)
        return found

    def _nearest(self, scored: ScoredImages) -> list[Baseline]:
        assert self.references is not None
        found = []
        for original, label in zip(scored.originals, scored.labels, strict=True):
            pool = torch.cat([self.references.of_class(int(label)), self.references.candidates])
            shares = self.shares(pool, original[None])[:, 0]
            nearest = pool[int(shares.argmax())]
            found.append(
                Baseline(features=float(shares.max()), precision=self._precision(nearest, original))
            )
        return found

    def _precision(self, row: Tensor, original: Tensor) -> float | None:
        """Return the share of a row that is the original's; None where a row has fixed columns."""
        del row, original
        return None

    def apart(self, example: Tensor, others: Tensor) -> Array:
        """Return `distances` of one row from others, ``(1, M)``."""
        found: Array = self.distances(example, others).numpy()
        return found

    def cells(
        self,
        row: Tensor,
        found: float,
        certainty: Tensor | None,
        original: Tensor | None = None,
        label: float | None = None,
    ) -> list[CellResult]:
        """Return the cells of one row, the target last.

        Parameters
        ----------
        row, original
            Features ``(D, 1, 1)``.
        found, label
            The recovered and the true target, a class or a standardised number.
        certainty
            ``(columns,)`` or None.
        """
        values = decode(self.schema, row)
        wanted = None if original is None else decode(self.schema, original)
        cells = []
        for i, column in enumerate(self.schema.columns):
            right = None if wanted is None else alike(column, values[i], wanted[i])
            cells.append(
                CellResult(
                    column=column.name,
                    public_name=column.name if column.public_name else "",
                    value=_shown(values[i], column),
                    original=None if wanted is None else _shown(wanted[i], column),
                    right=right,
                    certainty=None if certainty is None else float(certainty[i]),
                )
            )
        target = self.schema.target
        cells.append(
            CellResult(
                column=target.name,
                value=_shown(decode_target(self.schema, found)),
                original=None if label is None else _shown(decode_target(self.schema, label)),
                right=None if label is None else self._same_target(found, label),
            )
        )
        return cells

    def calibration(self, rows: Sequence[Sequence[CellResult]]) -> list[CalibrationBin]:
        """Compare certainty with how often it is right, in bins; empty without certainties."""
        known = [
            (cell.certainty, cell.right)
            for row in rows
            for cell in row
            if cell.certainty is not None and cell.right is not None
        ]
        places = [min(int(certainty * BINS), BINS - 1) for certainty, _ in known]
        return [
            CalibrationBin(
                low=b / BINS,
                high=(b + 1) / BINS,
                cells=places.count(b),
                right=sum(
                    right for (_, right), place in zip(known, places, strict=True) if place == b
                ),
            )
            for b in range(BINS)
            if b in places
        ]

    def notes(self) -> list[str]:
        """Return what the scores assume."""
        kind = self.schema.statistics
        return [
            "The schema's ranges, means and categories, which the attacker has, were taken from "
            + ("public knowledge." if kind == "public" else "rows of clients: they are private.")
        ]

    def shares(self, rows: Tensor, originals: Tensor) -> Tensor:
        """Return the share of columns that is right, float64 ``(N, M)``."""
        return matches(self.schema, rows, originals).double().mean(dim=2)

    def distances(self, rows: Tensor, originals: Tensor) -> Tensor:
        """Return `distances`, ``(N, M)``."""
        return distances(self.schema, rows, originals)

    def _pair(self, rows: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(order, kept)`` as `bract.scores.image.pair`."""
        from scipy.optimize import linear_sum_assignment

        cost = 1.0 - self.shares(rows, originals) + _TIE * self.distances(rows, originals)
        found, kept = linear_sum_assignment(cost.numpy())
        by_original = np.argsort(kept)
        if len(rows) < len(originals):
            return torch.from_numpy(found), torch.from_numpy(kept)
        return torch.from_numpy(found[by_original]), torch.from_numpy(kept[by_original])

    def _rows(self, rows: Tensor, originals: Tensor) -> list[Scores]:
        if rows.shape != originals.shape:
            raise BractError(
                f"cannot score rows of {tuple(rows.shape)} against {tuple(originals.shape)}",
                code="data-shape",
            )
        together = matches(self.schema, rows, originals)
        each = together[torch.arange(len(rows)), torch.arange(len(rows))]
        return [
            Scores(features=float(right.double().mean()), exact=bool(right.all())) for right in each
        ]

    def classes(self, labels: Tensor) -> list[int]:
        """Return the classes of targets; one for all where the target is a number."""
        return labels.long().tolist() if self.schema.target.categories else [0] * len(labels)

    def _same_target(self, found: float, label: float) -> bool:
        target = self.schema.target
        if target.categories:
            return round(found) == round(label)
        return abs(found - label) * target.std <= target.most_apart

    def _target_accuracy(
        self, recovered: Tensor | None, order: Tensor, labels: Tensor
    ) -> float | None:
        if recovered is None:
            return None
        pairs = zip(recovered[order].tolist(), labels.tolist(), strict=True)
        return sum(self._same_target(found, label) for found, label in pairs) / len(labels)


def matches(schema: TableSchema, rows: Tensor, originals: Tensor) -> Tensor:
    """Return whether each column is right, bool ``(N, M, columns)`` of N rows and M originals."""
    found, wanted = (_values(schema, part) for part in (rows, originals))
    apart = (found[:, None] - wanted[None]).abs()
    tolerance = torch.tensor([_tolerance(column) for column in schema.columns])
    return apart <= tolerance


def distances(schema: TableSchema, rows: Tensor, originals: Tensor) -> Tensor:
    """Return the mean distance over the columns, float64 ``(N, M)`` in [0, 1].

    That of categories is 0 or 1, that of numbers their difference in units of three standard
    deviations, at most 1.
    """
    found, wanted = (_values(schema, part) for part in (rows, originals))
    apart = (found[:, None] - wanted[None]).abs()
    scale = torch.tensor([_scale(column) for column in schema.columns], dtype=torch.float64)
    return (apart / scale).clamp_max(1.0).mean(dim=2)


def _values(schema: TableSchema, rows: Tensor) -> Tensor:
    """Return the column values ``(N, columns)`` in float64: numbers, or places of categories."""
    flat = rows.flatten(1).double().cpu()
    return torch.stack([_column(column, flat[:, place]) for column, place in schema.groups()], 1)


def _column(column: Column, part: Tensor) -> Tensor:
    if column.one_hot:
        return part.argmax(dim=1).double()
    low, high = column.range
    value = part[:, 0].clamp(0.0, 1.0) * (high - low) + low
    if column.kind != "continuous":
        value = value.round()
    if column.missing:
        # Beyond every other value, by more than any tolerance.
        absent = high + 10 * (high - low) + 10 * column.most_apart
        value = torch.where(part[:, 1] > 0.5, torch.full_like(value, absent), value)
    return value


def _tolerance(column: Column) -> float:
    if not column.is_number:
        return 0.5
    low, high = column.range
    return column.most_apart + 1e-6 * (high - low)


def _scale(column: Column) -> float:
    return _FARTHEST * column.moments[1] if column.is_number else 1.0


def _shown(value: Cell, column: Column | None = None) -> str | None:
    if isinstance(value, float):
        del column
        return f"{value:.5g}"
    return value


def _wrong_features(row: Scores) -> float:
    return -(row.features or 0.0)
