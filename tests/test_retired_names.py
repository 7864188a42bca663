"""Names that were retired for the field's own stay away."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import ROOMS, written

RETIRED = {
    "bench": "federations",
    "crew": "pool",
    "fate": "ending",
    "go_on_with_uploads": "resume_uploads",
    "hand_on_whole_answers": "forward_complete_replies",
    "hire": "start",
    "keep_even": "use_monotonic_clock",
    "taker": "model hook",
    "told": "declared, reported, sent",
    "watch_as_told": "watch",
}
"""Names of functions, classes, arguments, attributes and variables, and what to say instead."""

FILES = {
    "following": "beam_search, run_log",
    "holding": "long_polling",
    "linking": "bags",
    "pace": "polling",
    "peeling": "subtraction",
    "places": "capture_folders, data_folders, token_positions",
}
"""Names of modules, and what to say instead."""


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node gives to something."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def retired(path: Path) -> Iterator[str]:
    """Yield the retired names in a file, each with its line and with what to say instead."""
    stem = path.stem.removeprefix("test_")
    if stem in FILES:
        yield f"{path}: {stem} is {FILES[stem]} now"
    for node in ast.walk(ast.parse(path.read_text())):
        for name in names_of(node):
            if (plain := name.strip("_").lower()) in RETIRED:
                line = getattr(node, "lineno", 0)
                yield f"{path}:{line}: {name} is {RETIRED[plain]} now"


@pytest.mark.parametrize("room", [*ROOMS, "experiments", "plugins", "tests"])
def test_no_retired_name_comes_back(room: str) -> None:
    assert not [one for path in written(room) for one in retired(path)]


@pytest.mark.parametrize(
    "text",
    [
        "class Crew: pass",
        "def _hire(): pass",
        "def f(told): pass",
        "a.fate = 1",
        "for told in (): pass",
        "TAKER: int = 1",
    ],
)
def test_a_retired_name_is_found_wherever_it_is_given(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len(list(retired(path))) == 1


def test_a_file_of_a_retired_name_is_found(tmp_path: Path) -> None:
    for name in ("pace.py", "test_holding.py"):
        path = tmp_path / name
        path.write_text("told = 1")
        assert len(list(retired(path))) == 2
