"""Words that the guide quotes from a page are words that the code of the pages prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
"""Pages for users; those of single attacks below them quote papers."""

ITALICS = {"reading-the-page", "first-day"}
"""Pages whose italics are words of a page; others set terms that they define in italics."""

ROOMS = ("report", "audit", "scores", "cli")
"""Rooms whose words are printed on a page or by a command."""


def _plain(text: str) -> str:
    """Return a text in small letters with each number as ``#``."""
    return re.sub(r"\d+", "#", " ".join(text.replace("’", "'").split())).casefold()


def _strings(source: str) -> Iterator[str]:
    """Yield a module's strings, not its docstrings; a value in one is ``#``, as a number is."""
    nodes = list(ast.walk(ast.parse(source)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if id(node) in docs:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "#" for part in node.values
            )


@cache
def _printed() -> str:
    """Return all words of pages and commands, and whole sentences of the golden files."""
    parts = [
        text
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for text in _strings(path.read_text())
    ]
    for path in (ROOT / "report").rglob("*.j2"):
        parts.append(re.sub(r"<[^>]+>", "", path.read_text()))
    parts += [path.read_text() for path in (ROOT / "tests").rglob("golden/*.txt")]
    return "\n".join(map(_plain, parts))


def quoted(text: str, *, italics: bool) -> list[str]:
    """Return what a page of the guide quotes: in double quotation marks, or in italics too."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`]*`", "", prose)
    found = re.findall(r'"([^"\n]+)"|(?<![*\w])\*([^*\n]+)\*(?!\*)', prose)
    words = [one or (other if italics else "") for one, other in found]
    return [_plain(one).strip("().,: ") for one in words if one]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_what_the_guide_quotes_is_printed(page: Path) -> None:
    quotations = quoted(page.read_text(), italics=page.stem in ITALICS)
    lacking = [words for words in quotations if words not in _printed()]
    assert lacking == []


def test_a_quotation_that_no_page_prints_is_found() -> None:
    text = 'The page says "All 4 images attacked were hidden from everyone" and *readable*.'
    lost, kept = quoted(text, italics=True)
    assert lost not in _printed() and kept in _printed()
