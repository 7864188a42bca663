"""The package as a whole: its rooms are listed, and its wheel works outside the checkout."""

import ast
import importlib
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools
from environments import build_wheel, install, without_checkout
from rooms import ROOMS, packages, sources

from bract.errors import not_installed

ROOT = Path(__file__).parent.parent


def test_what_is_built_is_every_folder_with_code() -> None:
    found = setuptools.find_packages(str(ROOT), include=["bract", "bract.*"])
    assert set(found) == packages()


MOST_LINES = 500
"""Of one module: a longer one holds more than one idea."""


def test_no_module_is_longer_than_one_idea() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {str(path): n for path, n in lengths.items() if n > MOST_LINES} == {}


@pytest.mark.processes
def test_importing_the_audit_and_the_report_loads_no_flower() -> None:
    code = "import sys, bract.audit.audit, bract.report.comparison.comparison, bract.report\n"
    code += "print([name for name in sys.modules if name.partition('.')[0] == 'flwr'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.processes
@pytest.mark.parametrize(
    "room",
    [
        *("bract", "bract.client", "bract.server", "bract.strategies", "bract.report"),
        "bract.cli.main",
    ],
)
def test_importing_a_room_alone_loads_nothing_large(room: str) -> None:
    code = f"import sys, {room}; print({{'torch', 'flwr', 'pydantic', 'gmpy2'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "room", ["bract", "bract.client", "bract.server", "bract.strategies", "bract.report"]
)
def test_every_public_name_of_a_room_is_found(room: str) -> None:
    package = importlib.import_module(room)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


OF_OTHER_ROLES = {
    "site": {"sklearn", "scipy", "skimage", "lpips", "pyarrow", "fsspec", "flwr_datasets"},
    "server": {"scipy", "skimage", "lpips"},
}
"""Modules of packages that an installation for a role lacks."""

IMPORTED = """
import importlib, pkgutil, sys
absent, rooms = set(sys.argv[1].split()), sys.argv[2].split()

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for room in rooms:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        # A site that has a guard attacks its own updates, with the packages of an audit.
        if module.name != "bract.client.guard_attack":
            importlib.import_module(module.name)

from bract.cli.main import main
from bract.config import build_config
from bract.data.views import client_data, test_data

config = build_config({"data": {"validation": 0.0}})
client_data(config, 0), test_data(config.data)
"""


@pytest.mark.processes
@pytest.mark.parametrize("role", OF_OTHER_ROLES)
def test_a_role_does_without_the_packages_of_the_others(role: str) -> None:
    rooms = {
        "site": "bract.client bract.kits bract.runtime",
        "server": "bract.server bract.strategies",
    }
    core = "bract.config bract.data bract.defenses bract.inputs bract.models bract.protocol"
    line = [sys.executable, "-P", "-c", IMPORTED, " ".join(OF_OTHER_ROLES[role])]
    done = subprocess.run([*line, f"{rooms[role]} {core}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_of_another_role_has_an_extra_that_brings_it() -> None:
    """What a missing module's error advises."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for module in OF_OTHER_ROLES["site"]:
        error = not_installed(ModuleNotFoundError(name=f"{module}.deeper"))
        advised = re.search(r"(\S+) is not installed; pip install 'bract\[(\w+)\]'", str(error))
        assert advised is not None
        brought = extras["optional-dependencies"][advised[2]]
        assert any(re.match(rf"{advised[1]}[<>=]", each) for each in brought), module
        assert not any(each.startswith(advised[1]) for each in extras["dependencies"])
    assert not_installed(ModuleNotFoundError(name="numpy")) is None


@pytest.mark.parametrize("name", ["Scores", "Budget", "Declared", "Failure"])
def test_a_name_means_one_class_in_the_whole_package(name: Any) -> None:
    found = [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if _defines(node, name)
    ]
    assert len(found) <= 1, found


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
        f"importlib.import_module({name!r})\n" for name in packages()
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
