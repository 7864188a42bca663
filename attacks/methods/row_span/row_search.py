"""Find rows whose features lie in given spans: least squares in numbers, sweeps in categories."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bract.attacks.methods.row_span.spans import Spans
from bract.config.table import TableSchema
from bract.process import clock

STARTS = 192
"""Candidates side by side."""

_STEPS = 12
"""Levenberg-Marquardt steps between two sweeps over the categories."""

_TURNS = 4
"""Sweeps of a round."""

SOLVED = 1e-8
"""Mean squared relative residual below which a row is one of the batch: rounding of float32 leaves
1e-12 or less, and no wrong row of five sets that chose nothing came below 1e-4."""

_SAME = 1e-2
"""Largest difference in standardised features of two copies of a row."""

_COPIED = 0.6
"""Share of the columns in which a start is like a known row, where it is."""

_KNOWN = 5
"""Rows that must be known before starts are drawn like them."""


@dataclass
class SpanSearch:
    """Collects the rows of a batch.

    Parameters
    ----------
    mean, std
        Of the features, by which model inputs are standardised.
    solved, same
        Loss below which a row is one of the batch, and largest difference in standardised features
        of two copies of one.
    """

    spans: Spans
    schema: TableSchema
    mean: Tensor
    std: Tensor
    generator: torch.Generator
    solved: float = SOLVED
    same: float = _SAME
    found: list[Tensor] = field(default_factory=list)
    rounds_done: int = 0

    def __post_init__(self) -> None:
        hot = [column.one_hot for column in self.schema.columns for _ in range(column.width)]
        self._numbers = (~torch.tensor(hot)).nonzero().flatten()
        self._groups = [place for column, place in self.schema.groups() if column.one_hot]
        self._low = (-self.mean / self.std)[self._numbers]
        self._high = ((1.0 - self.mean) / self.std)[self._numbers]

    def run(self, rows: int, rounds: int, deadline: float | None) -> None:
        """Search until so many rows are known, or a limit is reached."""
        while len(self.found) < rows and self.rounds_done < rounds:
            if deadline is not None and clock.now() > deadline:
                return
            self._round()

    def _round(self) -> None:
        rows = self._starts()
        for _ in range(_TURNS if self._groups else 1):
            rows = self._sweep(rows)
            rows = self._descend(rows, _STEPS if self._groups else _TURNS * _STEPS)
        losses = self.spans.losses(rows)
        for index in losses.argsort().tolist():
            if float(losses[index]) > self.solved:
                break
            if all(float((rows[index] - one).abs().max()) > self.same for one in self.found):
                self.found.append(rows[index])
        self.rounds_done += 1

    def _starts(self) -> Tensor:
        """Draw rows: numbers from the declared moments, or like the rows that are known."""
        rows = torch.zeros(STARTS, self.schema.width, dtype=torch.float64)
        drawn = torch.randn(STARTS, len(self._numbers), generator=self.generator).double()
        if len(self.found) >= _KNOWN and self.rounds_done % 2:
            known = torch.stack(self.found)[:, self._numbers]
            apart = known - known.mean(dim=0)
            mix = torch.randn(STARTS, len(known), generator=self.generator).double()
            like = mix @ apart / len(known) ** 0.5
            drawn = known.mean(dim=0) + like + 0.3 * drawn
        rows[:, self._numbers] = drawn.clamp(self._low, self._high)
        copied = torch.zeros(STARTS, dtype=torch.bool)
        if len(self.found) >= _KNOWN:
            copied = torch.arange(STARTS) % 2 == 0
        for place in self._groups:
            size = place.stop - place.start
            picks = torch.randint(size, (STARTS,), generator=self.generator)
            if len(self.found) >= _KNOWN:
                # Like known rows in some columns: categories that go together stay together.
                kept = copied & (torch.rand(STARTS, generator=self.generator) < _COPIED)
                picks = torch.where(kept, self._known(place)[self._models()], picks)
            rows[:, place] = torch.nn.functional.one_hot(picks, size).double()
        return (rows - self._shift()) / self._scale()

    def _models(self) -> Tensor:
        """Return for each start a known row, the same for every column of a round."""
        generator = torch.Generator().manual_seed(self.rounds_done)
        return torch.randint(len(self.found), (STARTS,), generator=generator)

    def _known(self, place: slice) -> Tensor:
        """Return the category of each known row in a column."""
        return torch.stack([row[place] for row in self.found]).argmax(dim=1)

    def _sweep(self, rows: Tensor) -> Tensor:
        """Give each categorical column in turn its best category."""
        for at in torch.randperm(len(self._groups), generator=self.generator).tolist():
            place = self._groups[at]
            size = place.stop - place.start
            tried = rows.repeat_interleave(size, dim=0)
            shift, scale = self._shift()[place], self._scale()[place]
            hot = (torch.eye(size, dtype=rows.dtype) - shift) / scale
            tried[:, place] = hot.repeat(len(rows), 1)
            losses = self.spans.losses(tried).view(len(rows), size)
            best = torch.arange(len(rows)) * size + losses.argmin(dim=1)
            rows = tried[best]
        return rows

    def _descend(self, rows: Tensor, steps: int) -> Tensor:
        """Take Levenberg-Marquardt steps in the numbers, clipped to their range."""
        if not len(self._numbers):
            return rows
        damping = torch.full((len(rows),), 0.1, dtype=rows.dtype)
        with torch.no_grad():
            left = self.spans.residuals(rows)
        losses = left.square().sum(dim=1)
        for _ in range(steps):
            slope = self.spans.jacobian(rows, self._numbers)
            normal = slope.transpose(1, 2) @ slope
            wanted = slope.transpose(1, 2) @ left[:, :, None]
            ridge = normal.diagonal(dim1=1, dim2=2).clamp_min(1e-9) * damping[:, None]
            step = torch.linalg.solve(normal + torch.diag_embed(ridge), wanted)[:, :, 0]
            moved = rows.clone()
            moved[:, self._numbers] = (rows[:, self._numbers] - step).clamp(self._low, self._high)
            with torch.no_grad():
                after = self.spans.residuals(moved)
            less = after.square().sum(dim=1)
            better = less < losses
            rows = torch.where(better[:, None], moved, rows)
            left = torch.where(better[:, None], after, left)
            losses = torch.where(better, less, losses)
            damping = torch.where(better, damping * 0.3, damping * 4).clamp(1e-9, 1e6)
        return rows

    def _shift(self) -> Tensor:
        """Return what is taken from one-hot features: nothing from numbers, which are
        standardised.
        """
        shift = self.mean.clone()
        shift[self._numbers] = 0.0
        return shift

    def _scale(self) -> Tensor:
        scale = self.std.clone()
        scale[self._numbers] = 1.0
        return scale
