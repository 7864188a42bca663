"""Packages and sub-packages of each image.

python roles.py packages PYPROJECT FOLDER   # write all.txt, server.txt and audit.txt
python roles.py rooms PART FOLDER           # remove what an image of this part does not hold
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "client": ("attacks", "audit", "report", "server", "strategies"),
    "server": ("attacks", "audit", "report"),
    "audit": (),
}
"""Sub-packages of bract that the image of each part does not hold."""

LAYERS = {"client": ("all",), "server": ("all", "server"), "audit": ("all", "server", "audit")}
"""Layers of packages below each image; each is an extra of bract, ``all`` its own dependencies."""


def packages(pyproject: Path) -> dict[str, list[str]]:
    """Return the requirements of each layer; what begins with bract itself is the layer below."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    found = {"all": project["dependencies"], "server": extras["server"], "audit": extras["audit"]}
    return {
        layer: [package for package in wanted if not package.startswith("bract[")]
        for layer, wanted in found.items()
    }


def main(task: str, what: str, folder: Path) -> None:
    """Do one of the tasks above."""
    if task == "packages":
        for layer, wanted in packages(Path(what)).items():
            (folder / f"{layer}.txt").write_text("\n".join(wanted) + "\n")
    elif task == "rooms":
        (bract,) = folder.glob("lib/python3.*/site-packages/bract")
        for room in LEFT_OUT[what]:
            shutil.rmtree(bract / room)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
