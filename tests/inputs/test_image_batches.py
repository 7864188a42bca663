"""Batches of images: which of their whole numbers is the label."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused
from torch import Tensor

from bract.config import DataConfig
from bract.inputs import INPUTS, kept_examples
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


def test_rows_of_soft_labels_are_no_label() -> None:
    assert INPUTS["image"]().examples((IMAGES, torch.tensor([[0.9, 0.1], [0.5, 0.5]]))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("others", [{}, {"patient_id": NUMBERS}, {"age": torch.tensor([61, 40])}])
def test_rows_of_several_labels_are_kept(dtype: torch.dtype, others: dict[str, Tensor]) -> None:
    rows = torch.tensor([[1, 1, 0], [0, 1, 0]], dtype=dtype)
    found = INPUTS["image"]().examples({"img": IMAGES, **others, "labels": rows})
    assert found is not None and torch.equal(found[1], rows.float())


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        ([[0.0], [1.0]], torch.tensor([0, 1])),
        ([[0.5], [41.0]], torch.tensor([0.5, 41.0])),
        ([3.0, -1.0], torch.tensor([3.0, -1.0])),
        ([[0.5, 2.0], [0.1, 3.0]], torch.tensor([[0.5, 2.0], [0.1, 3.0]])),
    ],
)
def test_numbers_are_targets(targets: Any, kept: Tensor) -> None:
    found = INPUTS["image"]().examples({"img": IMAGES, "age": torch.tensor(targets)})
    assert found is not None and found[1].dtype == kept.dtype and torch.equal(found[1], kept)


@pytest.mark.parametrize(
    ("batch", "kept"),
    [
        ({"age": [61.5, 40.0], "patient_id": [100234, 100235]}, [61.5, 40.0]),
        ({"age": [61.5, 40.0], "patient_id": [7, 8]}, [61.5, 40.0]),
        ({"sex": [0, 1], "target": [61.5, 40.0]}, [61.5, 40.0]),
        ({"age": [61.5, 40.0], "finding": [3, 1]}, [3, 1]),
        ({"patient_id": [7, 8]}, [7, 8]),
    ],
)
def test_a_value_named_as_a_label_is_one_and_a_records_number_is_the_last(
    batch: Any, kept: list[float]
) -> None:
    named = {key: torch.tensor(values) for key, values in batch.items()}
    found = INPUTS["image"]().examples({"image": IMAGES} | named)
    assert found is not None and found[1].tolist() == kept


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ([[0.5, 2.0], [0.1, 3.0]], [[0.25, 0.75]]),
        ([[0.5, 2.0], [0.1, 3.0]], [[0.0, 1.0]]),
        ([[0.5], [2.0]], [[1.0]]),
    ],
)
def test_targets_are_of_the_kind_of_the_first_batch(first: Any, last: Any) -> None:
    seen = kept_examples((IMAGES, torch.tensor(first)))
    assert seen is not None
    found = kept_examples((IMAGES[:1], torch.tensor(last)), seen[1][0])
    assert found is not None and found[1].dtype == torch.float32
    assert torch.equal(found[1].reshape(1, -1), torch.tensor(last))


def test_images_of_any_height_and_width_are_read_and_data_sets_of_squares_named() -> None:
    wide = ClientDeclaration(image_shape=(1, 28, 56))
    kept = {"images": torch.rand(2, 1, 28, 56), "labels": torch.tensor([1, 0])}
    assert INPUTS["image"]().read(kept, wide).images.shape == (2, 1, 28, 56)
    with refused("data-shape", "28x56"):
        INPUTS["image"]().fitted(DataConfig(), wide)


def probabilities(rows: Any) -> dict[str, Tensor]:
    images = torch.rand(2, 1, 8, 8)
    return {"images": images, "labels": torch.tensor([1, 0]), "targets": torch.tensor(rows)}


def test_probabilities_that_a_client_kept_are_what_entered_the_loss() -> None:
    declared = ClientDeclaration(image_shape=(1, 8, 8))
    found = INPUTS["image"]().read(probabilities([[0.3, 0.7], [1.0, 0.0]]), declared)
    assert torch.equal(found.entered, torch.tensor([[0.3, 0.7], [1.0, 0.0]]))
    assert torch.equal(found.labels, torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([[0.3, 0.7]], "data-shape"),
        ([[0.3, 0.7], [1.2, -0.2]], "data-value"),
        ([[0.3, 0.7], [0.5, 0.4]], "data-value"),
        ([[0.3, float("nan")], [0.5, 0.5]], "data-value"),
        ([[1, 0], [0, 1]], "data-shape"),
    ],
)
def test_probabilities_of_another_form_are_refused(rows: Any, code: str) -> None:
    with refused(code, "targets"):
        INPUTS["image"]().read(probabilities(rows), ClientDeclaration(image_shape=(1, 8, 8)))
