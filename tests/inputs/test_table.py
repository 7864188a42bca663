from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refused

from bract.data.rows import decode
from bract.inputs import INPUTS, input_of, kept_examples
from bract.inputs.table import Table
from bract.schema import ClientDeclaration
from experiments.harness.rows import config_of, send_rows

SENT = send_rows("diabetes", 3, seed=0)
DECLARED = SENT.captured.declaration
KEPT = {"images": SENT.truth.images, "labels": SENT.truth.labels}


def test_batches_of_rows_are_recognised_and_images_left_to_their_input() -> None:
    rows, targets = torch.rand(4, 14), torch.rand(4, 1)
    found = kept_examples((rows, targets))
    assert found is not None and torch.equal(found[0], rows) and found[1].shape == (4,)
    classes = kept_examples({"x": rows, "y": torch.arange(4)})
    assert classes is not None and classes[1].dtype == torch.int64
    assert Table().examples((torch.rand(4, 1, 8, 8), torch.arange(4))) is None


def test_model_inputs_that_a_client_kept_become_features_again() -> None:
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (DECLARED.mean, DECLARED.std))
    inputs = ((SENT.truth.images - mean) / std).flatten(1)
    truth = input_of(DECLARED).read({"inputs": inputs, "labels": SENT.truth.labels}, DECLARED)
    assert torch.allclose(truth.images, SENT.truth.images, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": torch.tensor([0, 1, 0])}, ("data-shape", "torch.int64", "float32")),
        ({"labels": torch.tensor([0.0, torch.nan, 0.0])}, ("data-value",)),
        ({"images": torch.rand(3, 5, 1, 1)}, ("data-shape", "5", "11")),
        ({"images": SENT.truth.images + 1.0}, ("data-value", "0", "1")),
    ],
)
def test_truth_that_is_not_of_the_schema_is_refused(
    change: dict[str, torch.Tensor], named: tuple[str, ...]
) -> None:
    with refused(*named):
        input_of(DECLARED).read(KEPT | change, DECLARED)


def test_inputs_outside_a_columns_range_name_the_column() -> None:
    far = torch.zeros(3, 11)
    far[:, 0] = 50.0
    with refused("data-value", "age"):
        input_of(DECLARED).read({"inputs": far, "labels": SENT.truth.labels}, DECLARED)


def test_a_table_without_a_schema_cannot_be_read() -> None:
    bare = replace(DECLARED, table=None)
    with refused("declaration-lacks", "table"):
        input_of(bare).read(KEPT, bare)


def test_a_saved_row_is_a_csv_that_is_checked_as_such(tmp_path: Path) -> None:
    kind = input_of(DECLARED)
    name = kind.save(SENT.truth.images[0], tmp_path / "round.json", 0, "original")
    assert name == "round--00-original.csv"
    content = (tmp_path / name).read_bytes()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    Table.check_saved(name, content)
    values = content.decode().splitlines()[1].split(",")
    assert values[0] == str(decode(SENT.schema, SENT.truth.images[0])[0])
    for bad in (b"a,b\n1\n", b"\xff", b"a\n1\n2\n"):
        with refused("file-damaged", "x.csv", "CSV"):
            Table.check_saved("x.csv", bad)


def test_references_of_a_number_as_target_are_of_one_class() -> None:
    references = INPUTS["table"]().references(config_of("diabetes"), 0)
    assert torch.equal(references.of_class(3), references.of_class(0))
    mean = references.class_mean(torch.tensor([0.7, -1.0]))
    assert mean.shape == (2, 11, 1, 1) and torch.equal(mean[0], mean[1])


def test_kept_rows_are_references_without_those_of_the_update() -> None:
    other = send_rows("diabetes", 4, seed=9).truth
    kind = input_of(DECLARED)
    references = kind.kept_references([SENT.truth, other], 0)
    assert references is not None
    left = references.without(SENT.truth)
    assert left is not None and len(left.of_class(0)) <= 4
    assert references.without(SENT.truth) is not references


def test_a_declaration_keeps_its_schema_through_a_file() -> None:
    again = ClientDeclaration.from_dict(DECLARED.to_dict())
    assert again == DECLARED and again.table == SENT.schema
