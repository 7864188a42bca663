"""A record is written only if it can be read again."""

import json
import math
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field
from refusals import refused

from bract.schema import record


class Measured(record.VersionedRecord):
    kind: ClassVar[str] = "measured"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    loss: float = 0.0
    seconds: record.Number = None
    least: int = Field(default=0, ge=0)
    path: str = ""


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_is_refused_by_the_writer(loss: float) -> None:
    with refused("write-failed", "measured", "loss"):
        Measured(loss=loss).to_text()
    assert Measured.parse_text(Measured(seconds=loss).to_text(), source="x").seconds is None


def test_a_field_that_was_changed_past_its_checks_is_refused_by_the_writer() -> None:
    changes: dict[str, Any] = {"least": -1}
    with refused("write-failed", "least"):
        Measured().model_copy(update=changes).to_text()


@pytest.mark.parametrize("ascii_only", [True, False])
def test_what_is_written_is_what_is_read(ascii_only: bool) -> None:
    found = Measured(loss=1e300, seconds=0.5, least=3)
    text = found.to_text(ascii_only=ascii_only)
    assert Measured.parse_text(text, source="x") == found
    assert json.loads(text)["schema"] == 1


def test_a_field_of_another_release_is_named_as_such_and_a_damaged_file_is_not() -> None:
    text = json.dumps({"schema": 1, "later": 3})
    with refused("schema-version", "measured holds later", "another bract wrote it"):
        Measured.parse_text(text, source="x")
    with refused("file-damaged", "least"):
        Measured.parse_text(json.dumps({"schema": 1, "later": 3, "least": -1}), source="x")


def test_a_path_beyond_the_locale_is_written_and_read() -> None:
    """Python reads its bytes as lone surrogates, which UTF-8 has not."""
    found = Measured(path="l\udcc3\udca4ufe")
    assert Measured.parse_text(found.to_text().encode(), source="x") == found
