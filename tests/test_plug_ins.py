"""Packages of ``plugins/`` are distributions of their own, and know the core by public names."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from rooms import PLUG_INS, ROOT

from bract.installed import GROUPS, elsewhere
from bract.installed.versions import RESULT_CODE

IDS = [path.name for path in PLUG_INS]


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


CORE = project(ROOT)


def test_there_are_plug_ins() -> None:
    assert "bract_harden" in IDS


@pytest.mark.parametrize("package", PLUG_INS, ids=IDS)
def test_a_plug_in_uses_no_private_name_of_the_core(package: Path) -> None:
    """Which modules are public is held by `test_documentation`, for plug-ins and examples alike."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
                found += [f"{where} {n}" for n in names if n.partition(".")[0] == "bract"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bract"):
                names = [*(node.module or "").split("."), *(name.name for name in node.names)]
                private = [n for n in names if n.startswith("_") and n != "__version__"]
                found += [f"{where} {name}" for name in private]
    assert not found, "import names, not modules, and public ones: `from bract.ROOM import NAME`"


@pytest.mark.parametrize("package", PLUG_INS, ids=IDS)
def test_a_plug_in_is_of_the_core_s_release_and_an_extra_of_it(package: Path) -> None:
    own = project(package.parent)
    assert own["version"] == CORE["version"]
    assert own["name"] == package.name.replace("_", "-") == package.parent.name
    assert CORE["optional-dependencies"][own["name"].removeprefix("bract-")] == [own["name"]]
    minor = [int(part) for part in own["version"].split(".")[:2]]
    limits = f">={minor[0]}.{minor[1]},<{minor[0]}.{minor[1] + 1}"
    assert any(limits in each for each in own["dependencies"] if each.startswith("bract"))


@pytest.mark.parametrize("package", PLUG_INS, ids=IDS)
def test_the_core_knows_which_package_brings_an_entry(package: Path) -> None:
    own = project(package.parent)
    extra = own["name"].removeprefix("bract-")
    for group, entries in own["entry-points"].items():
        assert group in GROUPS
        assert set(entries) <= {name for name, one in elsewhere(group).items() if one == extra}
        installed = {one.name for one in entry_points(group=group)}
        assert set(entries) <= installed, f"make install, or pip install -e {package.parent}"


@pytest.mark.parametrize("package", PLUG_INS, ids=IDS)
def test_code_that_decides_results_is_digested_with_the_core_s(package: Path) -> None:
    decides = set(project(package.parent)["entry-points"]) - {"bract.commands"}
    assert (package.name in RESULT_CODE) == bool(decides)


def test_the_core_names_no_entry_that_no_package_brings() -> None:
    projects = [project(package.parent) for package in PLUG_INS]
    for group in GROUPS:
        brought = {name for one in projects for name in one["entry-points"].get(group, {})}
        assert set(elsewhere(group)) == brought


@pytest.mark.parametrize("package", PLUG_INS, ids=IDS)
def test_the_tools_check_a_plug_in_too(package: Path) -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert package.name in tools["importlinter"]["root_packages"]
    assert f"plugins/{package.parent.name}" in tools["mypy"]["mypy_path"].split(":")
    assert package.name in tools["ruff"]["lint"]["isort"]["known-first-party"]
    assert (package / "py.typed").is_file()
