"""Modules are one idea long."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300
REASON = ("longer than most modules", "the module is long because")


def modules() -> list[Path]:
    rooms = [folder.parent for folder in ROOT.glob("*/__init__.py")]
    return sorted(path for room in rooms for path in room.rglob("*.py"))


def test_a_module_of_over_300_lines_says_why_in_its_docstring() -> None:
    silent = []
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LIMIT:
            reason = " ".join((ast.get_docstring(ast.parse(text)) or "").lower().split())
            if not any(words in reason for words in REASON):
                silent.append(f"{path.name}: {len(text.splitlines())} lines")
    assert not silent
