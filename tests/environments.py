"""Folders into which packages are installed as a stranger would install them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def build_wheel(folder: Path) -> Path:
    """Build bract's wheel into a folder."""
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # what an earlier build left there
    _run("-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(package: Path, target: Path) -> None:
    """Install a wheel, or a copy of a package's sources, without dependencies."""
    if package.is_dir():
        package = shutil.copytree(package, target.with_name(f"{target.name}-{package.name}"))
    _run("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", "--target", target, package)  # fmt: skip


def without_checkout(**variables: str | Path) -> dict[str, str]:
    """Return the environment without a path to the checkout, and with some more variables."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return kept | {key: str(value) for key, value in variables.items()}


def _run(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, env=without_checkout(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
