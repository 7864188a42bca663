"""Codes of errors, and errors on their way from one process to another."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import ROOMS

from bract.errors import BractError, LeakageError, RunFailedError, RunStoppedError, codes, reworded
from bract.schema.record import RecordError

ROOT = Path(__file__).parents[2]
SEARCHED = (*ROOMS, "examples", "experiments")


@pytest.mark.parametrize(
    "error",
    [
        BractError("no such folder", code="usage"),
        RecordError("a.json", "no JSON"),
        RunStoppedError(3, 2),
        RunFailedError("no worker answers", code="worker-failed"),
        LeakageError("ssim 0.9"),
    ],
)
def test_an_error_of_another_process_comes_as_it_is(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
    assert found.code == error.code  # type: ignore[attr-defined]


def test_another_message_keeps_class_code_and_attributes() -> None:
    record = RecordError("a.json", "no JSON")
    found = reworded(record, f"client-0: {record}")
    assert type(found) is RecordError
    assert str(found) == f"client-0: {record}"
    assert found.detail == "no JSON"
    assert found.code == record.code
    assert reworded(RunFailedError("why", code="worker-failed"), "x").code == "worker-failed"


def _constructions() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of `BractError` in the product, with its place."""
    for room in SEARCHED:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called == "BractError":
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_construction_of_an_error_gives_a_code_of_the_table() -> None:
    found = list(_constructions())
    given_in = {
        place: [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        for place, call in found
    }
    assert len(found) > 800
    assert [place for place, given in given_in.items() if not given] == []
    written = {
        place: value.value
        for place, given in given_in.items()
        for value in given
        if isinstance(value, ast.Constant)
    }
    assert {place: code for place, code in written.items() if code not in codes.CODES} == {}


def test_a_code_that_the_table_lacks_is_an_error_at_construction() -> None:
    with pytest.raises(TypeError, match="made-up"):
        BractError("no such folder", code="made-up")
    with pytest.raises(TypeError, match="BractError"):
        BractError("no such folder")


def test_a_class_has_a_code_that_the_raise_site_overrides() -> None:
    assert RunFailedError("why").code == "run-failed"
    assert RunFailedError("why", code="worker-failed").code == "worker-failed"
    assert RunFailedError.code == "run-failed"


def test_codes_are_short_and_each_has_a_sentence() -> None:
    assert [code for code in codes.CODES if not re.fullmatch(r"[a-z]+(-[a-z]+){0,2}", code)] == []
    assert [code for code, text in codes.CODES.items() if not text.endswith((".", ")."))] == []
