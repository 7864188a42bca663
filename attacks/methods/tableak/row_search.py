"""Optimise rows of a table: numbers in their range, categories as softmax of free logits."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.problem.problem import Problem
from bract.config.table import TableSchema
from bract.updates.update import Tensors


class RowSearch:
    """Free rows of L trials, with known or free targets.

    Parameters
    ----------
    schema
        Whose one-hot groups are each the softmax of free logits, so that their sum is 1 on the way
        (Vero et al., ICML 2023, section 4.1). Every other feature is clipped to [0, 1] after each
        step.
    start
        ``(L, B, features)``: features where numbers begin, in [0, 1], and logits.
    labels
        ``(L, B, K)`` one-hot rows or values.
    free
        Whether labels are found jointly, from there.
    values
        Whether labels are values rather than probabilities.
    """

    def __init__(
        self,
        problem: Problem,
        schema: TableSchema,
        start: Tensor,
        labels: Tensor,
        *,
        free: bool,
        values: bool,
    ) -> None:
        self._groups = Groups(schema, start.device)
        self._labels, self._free, self._values = labels, free, values
        mean, std = problem.target_model.declaration.mean, problem.target_model.declaration.std
        width = start.shape[-1]
        self._mean = start.new_tensor(mean or (0.0,) * width)
        self._std = start.new_tensor(std or (1.0,) * width)
        hot = self._groups.hot
        # Numbers move in the model's units: a step is the same share of each column's spread.
        begun = torch.where(hot, start, (start - self._mean) / self._std)
        self.variables: Tensors = {"rows": begun.detach().clone().requires_grad_()}
        if free:
            given = labels if values else 2.0 * labels
            self.variables["labels"] = given.detach().clone().requires_grad_()

    @property
    def components(self) -> tuple[str, ...]:
        """Softmax of the categories, and whether targets are read off or found jointly."""
        return "softmax of categories", "labels joint" if self._free else "labels analytic"

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return rows ``(L, B, features, 1, 1)`` and labels."""
        rows = self.variables["rows"]
        numbers = rows * self._std + self._mean
        decoded = torch.where(self._groups.hot, self._groups.softmax(rows), numbers)
        return decoded[..., None, None], self._decoded_labels()

    def _decoded_labels(self) -> Tensor:
        if not self._free:
            return self._labels
        given = self.variables["labels"]
        return given if self._values else given.softmax(dim=-1)

    @torch.no_grad()
    def box(self) -> None:
        """Clip numbers to their range."""
        rows = self.variables["rows"]
        low, high = -self._mean / self._std, (1.0 - self._mean) / self._std
        rows.copy_(torch.where(self._groups.hot, rows, rows.clamp(low, high)))


class Groups:
    """The one-hot groups of a schema, as places to gather and scatter."""

    def __init__(self, schema: TableSchema, device: torch.device) -> None:
        places = [place for column, place in schema.groups() if column.one_hot]
        self.hot = torch.zeros(schema.width, dtype=torch.bool, device=device)
        most = max((place.stop - place.start for place in places), default=0)
        self._of_group = torch.zeros(len(places), most, dtype=torch.int64, device=device)
        self._filled = torch.zeros(len(places), most, dtype=torch.bool, device=device)
        for number, place in enumerate(places):
            size = place.stop - place.start
            self.hot[place] = True
            self._of_group[number, :size] = torch.arange(place.start, place.stop, device=device)
            self._filled[number, :size] = True

    def softmax(self, rows: Tensor) -> Tensor:
        """Return the softmax of each group of ``(..., features)``; zeros elsewhere."""
        if not len(self._of_group):
            return torch.zeros_like(rows)
        logits = rows[..., self._of_group.flatten()].view(*rows.shape[:-1], *self._of_group.shape)
        shares = logits.masked_fill(~self._filled, -torch.inf).softmax(dim=-1)
        flat = shares[..., self._filled]
        return torch.zeros_like(rows).index_copy(-1, self._of_group[self._filled], flat)
