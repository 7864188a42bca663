"""The published JSON Schemas: up to date, and what `bract init` gives to an editor."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from bract.cli.schemas import READ, WRITTEN, json_schema, write_schemas
from bract.cli.templates import template, write_template
from bract.config import load_config

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "schema"


def properties(schema: dict[str, Any], node: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the properties of a schema's node, references followed."""
    node = schema if node is None else node
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    found: dict[str, Any] = node["properties"]
    return found


def test_the_published_schemas_are_those_of_the_code() -> None:
    stale = [
        name
        for name in (*READ, *WRITTEN)
        if not (PUBLISHED / f"{name}.json").is_file()
        or (PUBLISHED / f"{name}.json").read_text(encoding="utf-8") != json_schema(name)
    ]
    assert not stale, "run: python -m bract.cli.schemas docs/schema"
    assert {path.stem for path in PUBLISHED.iterdir()} == {*READ, *WRITTEN, "harden"}


def test_the_schema_of_a_search_is_that_of_its_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["records", str(tmp_path)])
    runpy.run_module("bract_harden", run_name="__main__")
    stale = "run: python -m bract_harden docs/schema"
    assert (PUBLISHED / "harden.json").read_text() == (tmp_path / "harden.json").read_text(), stale


def test_every_schema_is_written(tmp_path: Path) -> None:
    written = write_schemas(tmp_path)
    assert {path.name for path in written} == {f"{name}.json" for name in (*READ, *WRITTEN)}


def test_a_field_has_the_name_that_the_file_has() -> None:
    assert properties(json.loads(json_schema("metrics")))["schema"]["const"] == 3
    assert "global" in properties(json.loads(json_schema("metrics")))


def test_an_editor_takes_a_defense_and_an_encryption_by_name_alone() -> None:
    found = properties(json.loads(json_schema("federation")))
    assert {"type": "string"} in found["defenses"]["anyOf"][0]["items"]["anyOf"]
    schemes = ["none", "paillier", "masks"]
    assert {"enum": schemes, "type": "string"} in found["encryption"]["anyOf"]


@pytest.mark.parametrize("section", ["data", "model", "training", "capture", "audit"])
def test_the_template_holds_no_key_that_the_schema_lacks(section: str) -> None:
    import yaml

    schema = json.loads(json_schema("federation"))
    content = yaml.safe_load(template("federation.yaml"))
    assert set(content) <= set(properties(schema))
    assert set(content[section]) <= set(properties(schema, properties(schema)[section]))


def test_init_points_to_a_schema_that_lies_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_template(path, force=False)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = path.parent / first.partition("$schema=")[2]
    assert schema.read_text(encoding="utf-8") == json_schema("federation")
    assert load_config(path).clients == 3
