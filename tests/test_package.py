"""The package as a whole: its rooms are listed, and its wheel works outside the checkout."""

import ast
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
from environments import build_wheel, install, without_checkout

ROOT = Path(__file__).parent.parent
MANIFEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders_with_code() -> set[str]:
    skipped = {".venv", "build", "tests", "experiments", "examples", "runs"}
    rooms = set()
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and parts[0] not in skipped and not parts[0].startswith("."):
            rooms.add("bract" if parts == ("bract",) else _import_name(parts))
    return rooms


def _import_name(parts: tuple[str, ...]) -> str:
    return ".".join(parts if parts[0] == "bract" else ("bract", *parts))


def test_every_folder_with_code_is_listed_as_a_package() -> None:
    assert folders_with_code() == set(MANIFEST["packages"])


def test_importing_the_audit_and_the_report_loads_no_flower() -> None:
    code = "import sys, bract.audit.audit, bract.report.comparison.comparison, bract.report\n"
    code += "print([name for name in sys.modules if name.partition('.')[0] == 'flwr'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["Scores", "Budget", "Declared", "Failure"])
def test_a_name_means_one_class_in_the_whole_package(name: Any) -> None:
    rooms = {package.split(".")[1] for package in MANIFEST["packages"] if "." in package}
    found = [
        path
        for room in sorted(rooms)
        for path in _folder(room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if _defines(node, name)
    ]
    assert len(found) <= 1, found


def _folder(room: str) -> Path:
    return ROOT / room if (ROOT / room).is_dir() else ROOT / "bract" / room


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return isinstance(node, ast.ClassDef) and node.name == name


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    install(wheel, site)
    # Dependencies come from this environment; its .pth files, and with them the checkout, do not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import importlib, bract\nprint(bract.__file__)\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in MANIFEST["packages"]
    )
    code += "from bract.cli.templates import template\ntemplate('demo.yaml')\n"
    done = subprocess.run(
        [python, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=without_checkout(),
    )
    assert done.returncode == 0, done.stderr
    assert str(environment) in done.stdout
    version = subprocess.run(
        [python, "-P", "-m", "bract.cli.main", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=without_checkout(),
    )
    assert version.stdout.startswith("bract ")
