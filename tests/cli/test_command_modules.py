"""Modules of the command line: short, and each option is declared once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rooms import ROOT, written

MODULES = [*written("cli"), *written("plugins")]

OTHER_MEANINGS = 38
"""Declarations of an option whose name another command's option has, with other words: ``--kit``
of the operator and of a site. This number may only fall."""

LINES = 400
"""The most lines of a module of the command line."""


def declared(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and help of every ``typer.Option`` and ``typer.Argument``; arguments have none."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "typer.Option",
            "typer.Argument",
        ):
            name = next((part.value for part in node.args if isinstance(part, ast.Constant)), "")
            help = next((ast.unparse(k.value) for k in node.keywords if k.arg == "help"), "")
            yield str(name), help


def declarations() -> Counter[tuple[str, str]]:
    return Counter(each for path in MODULES for each in declared(path))


def test_an_option_of_one_meaning_is_declared_once() -> None:
    """Counted are calls with the same first name and the same help, in all modules."""
    found = declarations()
    assert found["--device", "'auto, cpu or cuda:N.'"] == 1  # of three commands
    assert [each for each, times in found.items() if times > 1] == []


def test_few_options_of_one_name_mean_something_else_in_another_command() -> None:
    names = Counter(name for name, _ in declarations().elements() if name)
    assert sum(times - 1 for times in names.values()) <= OTHER_MEANINGS


def test_modules_of_the_command_line_are_short() -> None:
    lines = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in (ROOT / "cli").rglob("*.py")
    }
    assert {path: count for path, count in lines.items() if count > LINES} == {}


def test_the_main_module_declares_no_command_of_its_own() -> None:
    names = {name for name, _ in declared(ROOT / "cli" / "main.py")}
    assert names == {"--version", "--verbose"}
