"""Tables: sets that ship with scikit-learn and statsmodels, and files of CSV or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bract.config import DataConfig
from bract.config.table import TableSchema
from bract.data.infer_schema import infer_schema
from bract.data.rows import encode, encode_target
from bract.data.sources import DATASETS, Dataset, Source, Split
from bract.data.spec import DataSpec
from bract.errors import BractError, one_line, shown

Columns = Mapping[str, Sequence[Any]]

MOST_BYTES = 2**30
"""Largest file that is read."""


@dataclass(frozen=True)
class Rows(Source):
    """Encoded rows, ``(features, 1, 1)`` each, in [0, 1]."""

    rows: torch.Tensor | None = None

    def images(self, indices: Sequence[int], *, channels: int, size: int) -> torch.Tensor:
        """Return rows ``(n, features, 1, 1)``."""
        del channels, size
        assert self.rows is not None
        return self.rows[torch.as_tensor(list(indices), dtype=torch.int64)]


@dataclass(frozen=True)
class TableDataset(Dataset):
    """A table of rows.

    ``read`` returns the columns, the target among them, and the name of the source; ``embedded``
    whether the schema may be inferred from the whole set, which is public then.
    """

    read: Callable[[DataConfig, Split], tuple[Columns, str]] | None = None
    target: str = ""
    categorical: tuple[str, ...] = ()
    embedded: bool = True

    def schema(self, config: DataConfig) -> TableSchema:
        """Return the declared schema, or that of a public set."""
        if config.input != "table":
            raise BractError(
                f"data.name {config.name!r} holds a table, data.input is {config.input!r}; set "
                "data.input: table",
                code="input-mismatch",
            )
        if config.table is not None:
            return config.table
        if not self.embedded:
            raise BractError(
                f"data.name {config.name!r} needs data.table, the schema of the file that every "
                "client shares; `bract schema FILE --target COLUMN` infers one",
                code="config-key",
            )
        assert self.read is not None
        (train, source), (test, _) = (self.read(config, split) for split in ("train", "test"))
        table = {name: [*values, *test[name]] for name, values in train.items()}
        return infer_schema(
            table,
            target=self.target,
            categorical=self.categorical,
            statistics="public",
            source=source,
            public_names=True,
        )

    def splits_rows(self, config: DataConfig) -> bool:
        """Return whether ``config.path`` is one file; a folder holds a file for each split."""
        return not self.embedded and config.path is not None and not config.path.is_dir()

    def known_spec(self, config: DataConfig) -> DataSpec:
        """Return `spec`, which rests on a declared schema or a public set."""
        return self.spec(config)

    def spec(self, config: DataConfig) -> DataSpec:
        """Return the shape ``(features, 1, 1)``, and the schema's statistics."""
        schema = self.schema(config)
        mean, std = schema.feature_moments()
        return DataSpec(schema.shape, schema.outputs, mean, std, schema)


def open_rows(dataset: TableDataset, config: DataConfig, split: Split) -> Rows:
    """Encode one split."""
    assert dataset.read is not None
    schema = dataset.schema(config)
    table, source = dataset.read(config, split)
    if not dataset.embedded:
        check_columns(schema, list(table), source)
    if schema.target.name not in table:
        raise BractError(
            f"{source}: has no column {shown(schema.target.name)}, which is the target; add it",
            code="data-column",
        )
    rows = encode(schema, table, source=source)[:, :, None, None]
    labels = encode_target(schema, table[schema.target.name], source=source)
    return Rows(
        labels=labels,
        classes=schema.outputs,
        channels=schema.width,
        read=lambda i: rows[i],
        rows=rows,
    )


def check_columns(schema: TableSchema, found: Sequence[str], source: str) -> None:
    """Refuse a file whose columns are not those of the schema, in its order; the target anywhere.

    A file in another order was made by another program than the schema: then units and codes
    differ too, and names alone would not show it.
    """
    own = [name for name in found if name != schema.target.name]
    wanted = list(schema.names)
    if own == wanted:
        return
    if lacking := [name for name in wanted if name not in own]:
        raise BractError(
            f"{source}: has no column {shown(lacking[0])}; found {', '.join(map(shown, own[:20]))}",
            code="data-column",
        )
    if extra := [name for name in own if name not in wanted]:
        raise BractError(
            f"{source}: the column {shown(extra[0])} is not in data.table; take it out of the file",
            code="data-column",
        )
    at = next(i for i, name in enumerate(wanted) if own[i] != name)
    raise BractError(
        f"{source}: columns are in another order than in data.table: number {at + 1} is "
        f"{shown(own[at])}, expected {shown(wanted[at])}; write the file in the schema's order",
        code="data-column",
    )


def read_table(path: Path) -> dict[str, list[Any]]:
    """Read a CSV or Parquet file; every cell of a CSV is text.

    Raises
    ------
    BractError
        If it is not there, too large, of another kind, or cannot be read; it names the file.
    """
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    if not path.is_file():
        raise BractError(
            f"{path}: no such file; set data.path to a CSV or Parquet file", code="file-missing"
        )
    if path.stat().st_size > MOST_BYTES:
        raise BractError(
            f"{path}: larger than {MOST_BYTES} bytes; split it", code="file-unreadable"
        )
    try:
        if path.suffix.lower() == ".parquet":
            table = pq.read_table(path)
        elif path.suffix.lower() == ".csv":
            header = path.open("rb").readline().decode("utf-8-sig").strip().split(",")
            names = [name.strip().strip('"') for name in header]
            table = pc.read_csv(
                path,
                convert_options=pc.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
            )
        else:
            raise BractError(f"{path}: expected a file of .csv or .parquet", code="file-unreadable")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: no table that can be read ({one_line(error, 200)})", code="file-unreadable"
        ) from error
    names = [str(name) for name in table.column_names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BractError(
            f"{path}: two columns are called {shown(twice[0])}; rename one", code="data-column"
        )
    if not table.num_rows:
        raise BractError(f"{path}: holds no rows", code="data-empty")
    return {name: table.column(i).to_pylist() for i, name in enumerate(names)}


def _file(config: DataConfig, split: Split) -> tuple[Columns, str]:
    if config.path is None:
        raise BractError(
            "data.name 'csv' needs data.path: a CSV or Parquet file, or a folder that holds "
            "train.csv and test.csv",
            code="config-key",
        )
    if config.path.is_dir():
        found = [config.path / f"{split}{ending}" for ending in (".csv", ".parquet")]
        path = next((path for path in found if path.is_file()), found[0])
        return read_table(path), str(path)
    table = read_table(config.path)
    return _split(table, split), str(config.path)


def _split(table: Columns, split: Split) -> Columns:
    """Return every fifth row as test data, the others to train on."""
    count = len(next(iter(table.values())))
    kept = [i for i in range(count) if (i % 5 == 0) == (split == "test")]
    return {name: [values[i] for i in kept] for name, values in table.items()}


def _sklearn(name: str) -> Callable[[DataConfig, Split], tuple[Columns, str]]:
    def read(config: DataConfig, split: Split) -> tuple[Columns, str]:
        import sklearn.datasets

        del config
        bundle = getattr(sklearn.datasets, f"load_{name}")(
            **({"scaled": False} if name == "diabetes" else {})
        )
        table = {
            str(column): bundle.data[:, i].tolist() for i, column in enumerate(bundle.feature_names)
        }
        named = getattr(bundle, "target_names", None)
        table["target"] = (
            [str(named[t]) for t in bundle.target]
            if named is not None
            else (bundle.target.tolist())
        )
        return _split(table, split), f"scikit-learn's {name}"

    return read


def _statsmodels(
    name: str, change: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]
) -> Callable[[DataConfig, Split], tuple[Columns, str]]:
    def read(config: DataConfig, split: Split) -> tuple[Columns, str]:
        try:
            import statsmodels.api as sm
        except ImportError as error:
            raise BractError(
                f"data.name {config.name!r} ships with statsmodels, which is not installed; "
                "pip install 'bract[tables]'",
                code="package-missing",
            ) from error
        frame = getattr(sm.datasets, name).load_pandas().data
        table = {str(column): frame[column].tolist() for column in frame.columns}
        return _split(change(table), split), f"statsmodels' {name}"

    return read


def _fair(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    had = ["some" if value > 0 else "none" for value in table.pop("affairs")]
    return {name: [f"{v:g}" for v in values] for name, values in table.items()} | {"affairs": had}


def _anes96(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    kept = ("TVnews", "selfLR", "ClinLR", "DoleLR", "PID", "educ", "income")
    found = {name: [f"{v:g}" for v in table[name]] for name in kept}
    return found | {"age": table["age"], "vote": [f"{v:g}" for v in table["vote"]]}


def _modechoice(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    chosen = [i for i, picked in enumerate(table["choice"]) if picked == 1]
    names = ("ttme", "invc", "invt", "gc", "hinc")
    found: dict[str, list[Any]] = {name: [table[name][i] for i in chosen] for name in names}
    found["psize"] = [f"{table['psize'][i]:g}" for i in chosen]
    return found | {"mode": [f"{table['mode'][i]:g}" for i in chosen]}


def _register(name: str, read: Callable[..., Any], classes: int | None, **about: Any) -> None:
    dataset: TableDataset

    def open_split(config: DataConfig, split: Split) -> Source:
        return open_rows(dataset, config, split)

    dataset = TableDataset(open_split, 1, classes, (), (), read=read, **about)
    DATASETS.register(name)(dataset)


_FAIR = ("rate_marriage", "age", "yrs_married", "children", "religious", "educ")
_FAIR_ALL = (*_FAIR, "occupation", "occupation_husb")

_register("breast-cancer", _sklearn("breast_cancer"), 2, target="target")
_register("wine", _sklearn("wine"), 3, target="target")
_register("diabetes", _sklearn("diabetes"), 1, target="target", categorical=("sex",))
_register("fair", _statsmodels("fair", _fair), 2, target="affairs", categorical=_FAIR_ALL)
_register(
    "anes96",
    _statsmodels("anes96", _anes96),
    2,
    target="vote",
    categorical=("TVnews", "selfLR", "ClinLR", "DoleLR", "PID", "educ", "income"),
)
_register(
    "modechoice", _statsmodels("modechoice", _modechoice), 4, target="mode", categorical=("psize",)
)
_register("csv", _file, None, embedded=False)
