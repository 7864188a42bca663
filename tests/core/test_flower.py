"""What is not Flower's public API goes through one module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from refusals import refused

from bract.installed import flower
from bract.protocol import codes
from bract.runtime import rules

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "flwr.app",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.server.strategy",  # of the older API
}
ONE_PLACE = ROOT / "bract" / "installed" / "flower.py"


def modules() -> list[Path]:
    rooms = [folder.parent for folder in ROOT.glob("*/__init__.py")]
    return sorted(path for room in rooms for path in room.rglob("*.py") if path != ONE_PLACE)


def named(tree: ast.AST) -> set[str]:
    """Modules of Flower that are imported, or named in a string of their own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(flwr(?:\.\w+)+)(?::\w+)?", node.value)
            found.update({match[1]} if match else ())
    return {name for name in found if re.match(r"flwr(\.|$)", name)}


def test_no_other_module_names_what_is_private_to_flower() -> None:
    assert {"flwr.supercore.date", "flwr.cli.build"} <= named(ast.parse(ONE_PLACE.read_text()))
    strays = {path.name: named(ast.parse(path.read_text())) - PUBLIC for path in modules()}
    assert {name: found for name, found in strays.items() if found} == {}


SHOWN = """
import warnings
import flwr.app
before = list(warnings.filters)
from bract.installed import flower
from bract.runtime import rules
from bract.runtime.rule import at
for command in flower.COMMANDS:
    flower.entry_point(command)
for name in flower.NAMES:
    getattr(flower, name)
at(f"{flower.SIMULATION}:run_simulation_process")
print([each for each in warnings.filters if each not in before and each[2] is DeprecationWarning])
"""


@pytest.mark.processes
def test_what_flower_would_show_of_deprecated_calls_stays_hidden() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHOWN], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.processes
def test_the_installed_flower_has_every_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bract.runtime.rules"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"(\d+) of \1 rules", done.stdout)


def test_each_name_that_is_imported_is_one_that_a_rule_needs() -> None:
    assert {flower.place(name) for name in flower.NAMES} <= set(rules.private_names())


def test_a_command_that_flower_does_not_declare_is_named() -> None:
    for name in ("flower-gone", "flwr-agentapp"):
        with refused("flower-version", name):
            flower.entry_point(name)
    assert all(callable(flower.entry_point(name)) for name in flower.COMMANDS)


def test_codes_that_are_written_down_are_flower_s() -> None:
    from flwr.common import constant
    from flwr.supercore.constant import TaskType
    from flwr.supercore.error import ApiErrorCode

    theirs = constant.ErrorCode
    assert codes.ErrorCode.APP_RAISED == theirs.CLIENT_APP_RAISED_EXCEPTION
    assert codes.ErrorCode.MESSAGE_UNAVAILABLE == theirs.MESSAGE_UNAVAILABLE
    assert codes.ErrorCode.NODE_UNAVAILABLE == theirs.NODE_UNAVAILABLE
    assert codes.ErrorCode.MOD_FAILED_PRECONDITION == theirs.MOD_FAILED_PRECONDITION
    assert codes.ErrorCode.INVALID_BUNDLE == theirs.INVALID_FAB
    assert codes.RUN_ID_NOT_FOUND == ApiErrorCode.RUN_ID_NOT_FOUND
    assert codes.SERVER_APP == TaskType.SERVER_APP


def test_one_release_is_asked_for_everywhere() -> None:
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "flwr>=1.21" in manifest["project"]["dependencies"]
    assert all(flower.is_supported(f"{series}.3") for series in flower.SERIES)
    assert not flower.is_supported("1.410.0")
    assert not flower.is_supported("1.40.0")
    assert not flower.is_supported(None)
    assert f"`{flower.REQUIREMENT}`" in (ROOT / "docs" / "guide" / "flower.md").read_text()
