"""Batches of images: which of their whole numbers is the label."""

from __future__ import annotations

import pytest
import torch

from bract.inputs import INPUTS
from bract.schema import ClientDeclaration

IMAGES, LABELS = torch.rand(2, 1, 8, 8), torch.tensor([3, 1])
NUMBERS = torch.tensor([100234, 100235])


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, LABELS),
        (IMAGES, NUMBERS, LABELS),
        {"img": IMAGES, "patient": torch.tensor([7, 8]), "label": LABELS},
        {"img": IMAGES, "id": NUMBERS, "finding": LABELS},
        (IMAGES, torch.eye(4)[LABELS]),
        {"img": IMAGES, "sex": torch.eye(2), "finding": LABELS},
    ],
)
def test_a_records_number_is_not_its_label(batch: object) -> None:
    found = INPUTS["image"]().examples(batch)
    assert found is not None
    assert torch.equal(found[1], LABELS)


@pytest.mark.parametrize("rows", [[[1.0, 1, 0], [0, 1, 0]], [[0.9, 0.1], [0.5, 0.5]], [[0.0], [1]]])
def test_rows_of_several_or_soft_labels_are_no_label(rows: list[list[float]]) -> None:
    assert INPUTS["image"]().examples((IMAGES, torch.tensor(rows))) is None


def test_images_that_are_not_square_are_named_with_a_remedy() -> None:
    kind = INPUTS["image"]()
    wide = kind.unreadable(ClientDeclaration(image_shape=(1, 28, 56)))
    assert wide is not None and "56x56" in wide
    assert kind.unreadable(ClientDeclaration(image_shape=(1, 28, 28))) is None
