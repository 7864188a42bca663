"""``bract schema``: infer the schema of a table, to be checked by a person and shared by all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from bract.cli.console import print_json, say
from bract.config.table import TableSchema
from bract.data.infer_schema import infer_schema
from bract.data.tables import read_table

_HEAD = """\
# Inferred from {path}. Every party needs this same schema. Check the kinds, ranges and categories:
# they are part of the protocol, so the server and every client know them. They were taken from the
# rows of this file; if other people may not know them, replace them by public ones.
"""


def write_schema(
    path: Path,
    target: str,
    *,
    categorical: Sequence[str] = (),
    public: bool = False,
    described: bool = False,
    as_json: bool = False,
) -> None:
    """Print the schema of a CSV or Parquet file as a section of a configuration.

    Parameters
    ----------
    public
        Whether the rows of the file are public, or drawn from public knowledge.
    described
        Print the section of ``bract.yaml``, for an app that is not bract's.
    """
    schema = infer_schema(
        read_table(path),
        target=target,
        categorical=categorical,
        statistics="public" if public else "private",
        source=str(path),
    )
    content = _plain(schema)
    if as_json:
        print_json(content)
        return
    section: dict[str, Any] = {"table": content}
    section = (
        {"input": {"kind": "table", **section}}
        if described
        else {"data": {"name": "csv", "input": "table", "path": str(path), **section}}
    )
    sys.stdout.write(_HEAD.format(path=path))
    yaml.safe_dump(section, sys.stdout, sort_keys=False, allow_unicode=True, width=100)
    say(f"done: {len(schema.columns)} columns, {schema.width} features, target {target}")


def _plain(schema: TableSchema) -> dict[str, Any]:
    """Return the schema without values that are their defaults."""
    content = asdict(schema)
    content["columns"] = [_short(column) for column in content["columns"]]
    content["target"] = _short(content["target"])
    return content


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in entry.items() if v is not None and v is not False and v != ()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
