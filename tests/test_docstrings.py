"""Docstrings of functions say what the function does: they begin with a verb."""

from __future__ import annotations

import ast

import pytest
from rooms import ROOMS, ROOT, written

RELATIVE = {"how", "that", "what", "when", "where", "whether", "which", "who", "whoever", "why"}
"""Words that begin a relative clause, which leaves open what is done with what it names."""

MOST = 254
"""Docstrings of modules and classes that begin so."""


@pytest.mark.parametrize("room", [*ROOMS, "experiments", "plugins"])
def test_no_docstring_of_a_function_begins_with_a_relative_clause(room: str) -> None:
    found = []
    for path in written(room):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].strip("`.,:").lower() in RELATIVE:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not found


def test_fewer_docstrings_of_modules_and_classes_begin_so() -> None:
    """Those that stand may go, and no new one may come."""
    found = set()
    for room in [*ROOMS, "experiments", "plugins"]:
        for path in written(room):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.Module):
                    words = (ast.get_docstring(node) or "").split()
                    if words and words[0].strip("`.,:").lower() in RELATIVE:
                        found.add((path.resolve(), getattr(node, "name", "")))
    assert len(found) <= MOST, f"{len(found)} of {MOST}; a new one begins with a noun or a verb"
