"""The package as a whole: its rooms are listed, and its wheel works outside the checkout."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
MANIFEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders_with_code() -> set[str]:
    skipped = {".venv", "build", "tests", "benchmarks", "runs"}
    rooms = set()
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and parts[0] not in skipped and not parts[0].startswith("."):
            rooms.add("bract" if parts == ("bract",) else _import_name(parts))
    return rooms


def _import_name(parts: tuple[str, ...]) -> str:
    return ".".join(parts if parts[0] == "bract" else ("bract", *parts))


def test_every_folder_with_code_is_listed_as_a_package():
    assert folders_with_code() == set(MANIFEST["packages"])


def test_the_wheel_works_in_an_environment_of_its_own(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel],
        check=True,
        capture_output=True,
    )
    # Dependencies come from this environment; its .pth files, and with them the checkout, do not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import importlib, bract\nprint(bract.__file__)\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in MANIFEST["packages"]
    )
    code += "from bract.cli.templates import template\ntemplate('demo.yaml')\n"
    done = subprocess.run(
        [python, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(environment) in done.stdout
    version = subprocess.run(
        [python, "-P", "-m", "bract.cli.main", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.startswith("bract ")
