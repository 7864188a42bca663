import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from refusals import refused

from bract.config import DataConfig
from bract.config.table import Column, TableSchema, Target
from bract.data.infer_schema import infer_schema
from bract.data.rows import alike, decode, decode_target, encode, encode_target, project
from bract.data.sources import open_source
from bract.data.views import data_spec
from bract.errors import BractError

SCHEMA = TableSchema(
    columns=(
        Column("age", "integer", low=0.0, high=100.0, mean=50.0, std=20.0),
        Column("dose", "continuous", low=-1.0, high=1.0, std=0.5, missing=True),
        Column("stage", "ordinal", categories=("I", "II", "III")),
        Column("ward", "categorical", categories=("a", "b"), missing=True),
    ),
    target=Target("outcome", ("well", "ill")),
)
ROWS: dict[str, list[Any]] = {
    "age": ["25", 100],
    "dose": [0.5, None],
    "stage": ["II", "III"],
    "ward": ["b", "?"],
}


def test_a_row_is_encoded_as_its_schema_says() -> None:
    found = encode(SCHEMA, ROWS, source="rows")
    # age, dose and its flag, the stage's rank, and one of a, b and missing.
    assert SCHEMA.width == 7
    assert found.tolist() == [[0.25, 0.75, 0, 0.5, 0, 1, 0], [1, 0.5, 1, 1, 0, 0, 1]]


def test_features_are_standardised_by_the_declared_moments() -> None:
    mean, std = SCHEMA.feature_moments()
    # Of 0.5 in -1 to 1: (0.5 - 0) / 0.5 = 1, which is (0.75 - 0.5) / 0.25 of the feature.
    assert (0.75 - mean[1]) / std[1] == pytest.approx(1.0)
    assert mean == (0.5, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0)
    assert std == (0.2, 0.25, 1.0, 0.5, 1.0, 1.0, 1.0)


def test_decoding_gives_the_row_back() -> None:
    found = [decode(SCHEMA, row) for row in encode(SCHEMA, ROWS, source="rows")]
    assert found == [[25.0, 0.5, "II", "b"], [100.0, None, "III", None]]


@given(st.lists(st.floats(-1, 2), min_size=7, max_size=7))
def test_a_projection_is_a_row_of_the_schema_and_stays_one(values: list[float]) -> None:
    once = project(SCHEMA, torch.tensor(values))
    assert torch.allclose(project(SCHEMA, once), once, atol=1e-6)
    assert float(once[4:].sum()) == 1.0 and set(once[4:].tolist()) <= {0.0, 1.0}
    assert float(once[:4].min()) >= 0.0 and float(once[:4].max()) <= 1.0
    assert float(once[0]) * 100 == pytest.approx(round(float(once[0]) * 100), abs=1e-4)


def test_numbers_outside_the_range_are_clipped_to_it() -> None:
    found = encode(SCHEMA, ROWS | {"age": [-5, 250]}, source="rows")
    assert found[:, 0].tolist() == [0.0, 1.0]


def test_a_number_is_right_within_a_tenth_of_the_deviation() -> None:
    age, ward = SCHEMA.columns[0], SCHEMA.columns[3]
    assert alike(age, 50.0, 52.0) and not alike(age, 50.0, 52.1)
    assert alike(ward, None, None) and not alike(ward, "a", None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ward": ["b", "z"]}, ("data-value", "2", "z", "ward")),
        ({"age": ["25", "old"]}, ("data-value", "2", "old", "age")),
        ({"age": [None, 3]}, ("data-value", "1", "age")),
        ({"stage": ["IV", "I"]}, ("data-value", "IV", "stage")),
    ],
)
def test_a_value_that_the_schema_does_not_allow_is_refused_by_name(
    change: dict[str, list[Any]], named: tuple[str, ...]
) -> None:
    with refused(*named):
        encode(SCHEMA, ROWS | change, source="rows.csv")


def test_a_missing_column_is_refused_by_name() -> None:
    left = {name: values for name, values in ROWS.items() if name != "stage"}
    with refused("data-column", "rows.csv", "stage"):
        encode(SCHEMA, left, source="rows.csv")


def test_targets_are_classes_or_standardised_numbers() -> None:
    classes = encode_target(SCHEMA, ["ill", "well"], source="rows")
    assert classes.tolist() == [1, 0] and classes.dtype == torch.int64
    price = TableSchema(SCHEMA.columns, Target("price", mean=100.0, std=20.0))
    found = encode_target(price, ["110", 80], source="rows")
    assert found.tolist() == [0.5, -1.0]
    assert decode_target(price, 0.5) == 110.0 and decode_target(SCHEMA, 1.0) == "ill"


def test_a_missing_target_is_refused_by_row() -> None:
    with refused("data-value", 2, "outcome"):
        encode_target(SCHEMA, ["ill", math.nan], source="rows")


@pytest.mark.parametrize(
    ("column", "named"),
    [
        ({"name": "x", "low": 1.0, "high": 1.0}, "constant"),
        ({"name": "x"}, "no low and high"),
        ({"name": "x", "kind": "categorical", "categories": ["a"]}, "two or more"),
        (
            {
                "name": "x",
                "kind": "categorical",
                "categories": ["a", "b"],
                "encoder": "standardise",
            },
            "one-hot or embedding",
        ),
    ],
)
def test_a_column_that_cannot_be_encoded_is_refused(column: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Column(**column)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="two columns are called 'age'"):
        TableSchema((SCHEMA.columns[0], SCHEMA.columns[0]), SCHEMA.target)


def test_a_schema_is_inferred_and_constant_columns_are_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = {
        "age": ["20", "30", "40"],
        "score": ["1.5", "", "2.5"],
        "ward": ["a", "b", "a"],
        "code": ["1", "2", "1"],
        "site": ["x", "x", "x"],
        "y": ["no", "yes", "no"],
    }
    found = infer_schema(table, target="y", categorical=("code",), source="rows.csv")
    assert [(c.name, c.kind, c.missing) for c in found.columns] == [
        ("age", "integer", False),
        ("score", "continuous", True),
        ("ward", "categorical", False),
        ("code", "categorical", False),
    ]
    assert found.columns[0].mean == 30.0 and found.columns[0].range == (20.0, 40.0)
    assert found.columns[0].std == pytest.approx(math.sqrt(200 / 3))
    assert found.target.categories == ("no", "yes") and found.statistics == "private"
    assert "the column site is constant" in caplog.text


def csv(folder: Path, text: str) -> DataConfig:
    path = folder / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return DataConfig(name="csv", input="table", path=path, table=SCHEMA)


GOOD = "age,dose,stage,ward,outcome\n" + "25,0.5,II,b,ill\n" * 10


def test_a_file_is_split_and_read_by_its_schema(tmp_path: Path) -> None:
    config = csv(tmp_path, GOOD)
    train, test = open_source(config, "train"), open_source(config, "test")
    assert (len(train.labels), len(test.labels)) == (8, 2)
    assert train.images([0], channels=0, size=0).shape == (1, 7, 1, 1)
    assert data_spec(config).image_shape == (7, 1, 1) and data_spec(config).classes == 2


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {n: v * 5 for n, v in ROWS.items() if n not in ("age", "ward")}
    columns |= {"age": [25, 100] * 5, "ward": ["b", None] * 5, "outcome": ["ill", "well"] * 5}
    table = pa.table({n: columns[n] for n in (*SCHEMA.names, "outcome")})
    pq.write_table(table, tmp_path / "rows.parquet")
    config = csv(tmp_path, GOOD).model_copy(update={"path": tmp_path / "rows.parquet"})
    row = open_source(config, "train").images([0], channels=0, size=0)[0, :, 0, 0]
    assert decode(SCHEMA, row) == [100.0, None, "III", None]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD.replace("age,dose", "dose,age"), "another order.*number 1 is 'dose', expected 'age'"),
        (GOOD.replace("ward", "block"), "has no column 'ward'"),
        (GOOD.replace(",outcome", ",result"), "the column 'result' is not in data.table|target"),
        ("age,dose,stage,ward,outcome\n", "holds no rows"),
        (GOOD.replace("ill\n", "\n", 2), "no value of the target"),
        (GOOD.replace("II", "V"), "category 'V'"),
    ],
)
def test_a_file_that_is_not_of_the_schema_is_refused_by_name(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(BractError, match=named) as error:
        open_source(csv(tmp_path, text), "train")
    assert "rows.csv" in str(error.value)


def test_a_file_without_its_schema_is_refused(tmp_path: Path) -> None:
    config = csv(tmp_path, GOOD).model_copy(update={"table": None})
    with refused("config-key", "data.table"):
        open_source(config, "train")


def test_images_declared_as_a_table_are_refused_and_tables_as_images() -> None:
    with refused("input-mismatch", "digits"):
        data_spec(DataConfig(name="digits", input="table"))
    with refused("input-mismatch", "wine", "table", "data.input", "image"):
        data_spec(DataConfig(name="wine"))


@pytest.mark.parametrize(("name", "width"), [("breast-cancer", 30), ("wine", 13), ("diabetes", 11)])
def test_the_sets_of_scikit_learn_have_public_schemas(name: str, width: int) -> None:
    spec = data_spec(DataConfig(name=name, input="table"))
    assert spec.image_shape == (width, 1, 1) and spec.table is not None
    assert spec.table.statistics == "public"
    assert spec.loss == ("mse" if name == "diabetes" else "cross_entropy")


def test_a_site_whose_columns_are_in_another_order_fails_alone(tmp_path: Path) -> None:
    from bract.config import build_config
    from bract.data.views import client_data

    shared = build_config(
        {
            "clients": 1,
            "data": {
                "name": "csv",
                "input": "table",
                "validation": 0.0,
                "table": TypeAdapter(TableSchema).dump_python(SCHEMA, mode="json"),
            },
        }
    )
    texts = {"site-0": GOOD, "site-1": GOOD.replace("age,dose", "dose,age"), "site-2": GOOD}
    rows = {}
    for site, text in texts.items():
        path = tmp_path / f"{site}.csv"
        path.write_text(text, encoding="utf-8")
        data = shared.data.model_copy(update={"path": path})
        try:
            rows[site] = len(client_data(shared.model_copy(update={"data": data}), 0).images)
        except BractError as error:
            assert "site-1.csv" in str(error) and "another order" in str(error)
    assert rows == {"site-0": 8, "site-2": 8}
