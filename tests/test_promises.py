"""Each promise of the documents about security stands there, and names tests that hold it."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    *("threat-model.md", "encryption.md", "site-policy.md", "security.md", "defenses.md"),
    *("membership.md", "reading-the-page.md"),
)
PROMISES: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    (ROOT / "docs" / "promises.yaml").read_text(encoding="utf-8")
)


def plain(text: str) -> str:
    return " ".join(text.split())


def skipped(test: ast.FunctionDef) -> bool:
    """Return whether a test never runs, or may fail."""
    marks = (ast.unparse(mark) for mark in test.decorator_list)
    return any(m.partition("(")[0].endswith(("mark.skip", "mark.xfail")) for m in marks)


def functions_in(path: Path) -> dict[str, ast.FunctionDef]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    return {f.name: f for f in module.body if isinstance(f, ast.FunctionDef)}


def test_the_documents_that_promise_are_listed() -> None:
    assert set(PROMISES) == set(DOCUMENTS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_promise_stands_in_its_document_as_it_is_listed(document: str) -> None:
    text = plain((ROOT / "docs" / "guide" / document).read_text(encoding="utf-8"))
    missing = [entry["says"] for entry in PROMISES[document] if plain(entry["says"]) not in text]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_promise_names_tests_that_run(document: str) -> None:
    lacking = []
    for entry in PROMISES[document]:
        assert entry["tests"], entry["says"]
        for test in entry["tests"]:
            file, _, name = test.partition("::")
            path = ROOT / file
            found = functions_in(path).get(name) if path.is_file() else None
            if found is None or skipped(found):
                lacking.append(test)
    assert lacking == []
