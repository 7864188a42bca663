import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bract.cli.main import app
from bract.cli.templates import DemoData, demo_config
from bract.config.config import parse_config
from bract.schema.description_text import parse_description

LINES = [f"{20 + i},{'ab'[i % 2]},{('no', 'yes')[i % 2]}" for i in range(9)]
TEXT = "\n".join(["age,ward,outcome", *LINES])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(TEXT, encoding="utf-8")
    return path


def printed(*words: str) -> str:
    found = CliRunner().invoke(app, ["schema", *words])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_an_inferred_schema_is_a_section_of_a_configuration(rows: Path) -> None:
    text = printed(str(rows), "--target", "outcome", "--public")
    config = parse_config(text, source="printed")
    assert config.data.table is not None and config.data.path == rows
    assert [c.kind for c in config.data.table.columns] == ["integer", "categorical"]
    assert config.data.table.statistics == "public"


def test_an_inferred_schema_is_a_section_of_a_description(rows: Path) -> None:
    text = printed(str(rows), "--target", "outcome", "--describe")
    found = parse_description(text).input
    assert found.table is not None and found.table.target.categories == ("no", "yes")
    assert found.table.statistics == "private"
    assert yaml.safe_load(text)["input"]["kind"] == "table"


def test_an_inferred_schema_is_json_where_that_is_asked(rows: Path) -> None:
    content = json.loads(printed(str(rows), "--target", "outcome", "--format", "json"))
    assert content["target"]["name"] == "outcome"


def test_the_demo_learns_from_a_table_where_that_is_asked() -> None:
    config = demo_config(quick=True, data=DemoData.TABLE)
    assert config.data.input == "table" and config.audit.attacks == ["row-span"]
