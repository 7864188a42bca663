"""Make virtual environments that differ in their Flower alone.

    python tests/flower/flowers.py FOLDER 1.21 1.30 newest

Each has a Flower of its own with what that requires, and takes everything else, PyTorch and bract
among it, from the environment that runs this. Prints the Python of each, one a line.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

ALL = ("1.21", "1.26", "1.30", "1.36", "1.39", "1.41", "1.42", "newest")
"""Releases of Flower that `make flower` runs."""

FEW = ("1.21", "1.30", "newest")
"""Those that continuous integration runs."""


def main() -> None:
    """Make the environments that are named, or ``few`` or ``all`` of them."""
    folder, *named = sys.argv[1:]
    wanted = {"all": ALL, "few": FEW}.get(" ".join(named), tuple(named))
    for release in wanted:
        sys.stdout.write(f"{environment(Path(folder), release)}\n")
        sys.stdout.flush()


def environment(folder: Path, release: str) -> Path:
    """Return the Python of an environment with one release of Flower; it is made once."""
    home = (folder / release).absolute()
    python = home / "bin" / "python"
    stamp = home / "made-for"
    made_for = f"{sys.prefix}\n"
    if stamp.is_file() and stamp.read_text() == made_for and release != "newest":
        return python
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--clear", "-p", sys.executable, home], check=True)
    asked = "flwr" if release == "newest" else f"flwr=={release}.*"
    # PyTorch was built for this numpy, and the environment's own would come before it.
    same = [f"{name}=={version(name)}" for name in ("numpy",)]
    subprocess.run([uv, "pip", "install", "--quiet", "-p", python, asked, *same], check=True)
    shared = sysconfig.get_path("purelib")
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    # Behind the environment's own packages, with bract's editable installation.
    (Path(own) / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    stamp.write_text(made_for)
    return python


if __name__ == "__main__":
    main()
