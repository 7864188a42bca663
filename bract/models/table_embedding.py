"""A perceptron on the columns of a table, with an embedding of each categorical one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bract.config.table import TableSchema
from bract.errors import BractError
from bract.models.registry import MODELS, activation_layer

HIDDEN = (100, 100)
"""Units of the hidden layers."""

MOST_DIMENSIONS = 8
"""Most dimensions of a category's embedding; half as many as there are categories otherwise."""


class ColumnEmbedding(nn.Module):
    """Replace each one-hot group of a row by a row of the column's own matrix.

    The product of a one-hot vector and a matrix is a look-up: its gradient, too, is zero in every
    row of the matrix but that of the category. Columns without an ``embedding`` encoder pass.

    Parameters
    ----------
    table
        Schema of the rows.
    """

    def __init__(self, table: TableSchema) -> None:
        super().__init__()
        self.table = table
        self.matrices = nn.ParameterList()
        self.out_features = 0
        for column in table.columns:
            size = column.width
            if column.embedded:
                size = min(MOST_DIMENSIONS, (column.width + 1) // 2)
                self.matrices.append(nn.Parameter(torch.randn(column.width, size)))
            self.out_features += size

    def reset_parameters(self) -> None:
        """Draw every matrix anew from N(0, 1), as `torch.nn.Embedding` does."""
        for matrix in self.matrices:
            nn.init.normal_(matrix)

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``(B, features)`` to ``(B, out_features)``."""
        matrices = iter(self.matrices)
        parts = [
            rows[:, place] @ next(matrices) if column.embedded else rows[:, place]
            for column, place in self.table.groups()
        ]
        return torch.cat(parts, dim=1)


@MODELS.register("table-embedding")
def table_embedding(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    table: TableSchema | None = None,
) -> nn.Module:
    """Build embeddings of the columns that are declared so, and two hidden layers of 100 units."""
    del channels, image_size
    if table is None:
        raise BractError(
            "model 'table-embedding' takes rows of a table; set data.input: table",
            code="input-mismatch",
        )
    columns = ColumnEmbedding(table)
    first, second = HIDDEN
    return nn.Sequential(
        columns,
        nn.Linear(columns.out_features, first),
        activation_layer(activation),
        nn.Linear(first, second),
        activation_layer(activation),
        nn.Linear(second, classes),
    )
