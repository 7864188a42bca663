"""The schema of a table, guessed from rows that clients kept."""

from __future__ import annotations

import pytest
import torch
from refusals import refused

from bract.audit.description.rows import guess_schema


def test_one_hot_features_become_one_column_and_others_keep_their_numbers() -> None:
    rows = torch.tensor([[0.5, 1, 0, 0, -2.0], [1.5, 0, 1, 0, 3.0], [2.5, 0, 0, 1, -2.0]])
    schema = guess_schema(
        [rows[:1], rows[1:]], [torch.tensor([0]), torch.tensor([2, 1])], outputs=4
    )
    assert [(c.name, c.kind, c.width) for c in schema.columns] == [
        ("feature 1", "continuous", 1),
        ("features 2 to 4", "categorical", 3),
        ("feature 5", "continuous", 1),
    ]
    assert schema.width == 5
    first = schema.columns[0]
    assert (first.low, first.high) == (0.5, 2.5)
    # The deviation of 0.5, 1.5, 2.5 is sqrt(2/3).
    assert first.most_apart == pytest.approx((2 / 3) ** 0.5 / 10)
    mean, std = (torch.tensor(values) for values in schema.feature_moments())
    units = (rows - torch.tensor([0.5, 0, 0, 0, -2])) / torch.tensor([2.0, 1, 1, 1, 5])
    assert torch.allclose((units - mean) / std, rows)
    assert schema.target.categories == ("0", "1", "2", "3")


def test_flags_that_are_never_all_taken_stay_numbers() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    schema = guess_schema([rows], [torch.zeros(3).long()], outputs=None)
    assert [c.kind for c in schema.columns] == ["continuous", "continuous"]


@pytest.mark.parametrize(
    ("targets", "objective"),
    [([0.0, 1.0], "binary_cross_entropy_logits"), ([0.5, 7.0], "mse")],
)
def test_float_targets_are_two_classes_or_a_number(targets: list[float], objective: str) -> None:
    rows = torch.tensor([[1.0], [2.0]])
    schema = guess_schema([rows], [torch.tensor(targets)], outputs=1)
    assert schema.target.objective == objective


def test_a_constant_feature_is_kept_in_its_place() -> None:
    rows = torch.tensor([[3.0, 1.0], [3.0, 2.0]])
    schema = guess_schema([rows], [torch.tensor([0, 1])], outputs=2)
    assert [(c.low, c.high) for c in schema.columns] == [(2.0, 4.0), (1.0, 2.0)]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([torch.ones(1, 2), torch.ones(1, 3)], ("truth-unusable", "2", "3")),
        ([torch.full((1, 2), float("nan"))], ("truth-unusable",)),
        ([torch.ones(1, 5000)], ("truth-unusable", "2048")),
    ],
)
def test_rows_that_are_no_table_are_refused(
    rows: list[torch.Tensor], reason: tuple[str, ...]
) -> None:
    with refused(*reason):
        guess_schema(rows, [torch.zeros(len(r)).long() for r in rows], outputs=2)
