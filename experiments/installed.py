"""Packages and megabytes that an installation for each role brings, from what is installed here.

    python -m experiments.installed [--json]

The requirements of ``pyproject.toml`` are followed through the metadata of the installed packages;
a package's size is that of its files as pip has listed them. The build of torch is this machine's.
"""

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from experiments.harness.command import emit, parser

COLUMNS = ["role", "packages", "MB", "MB without torch's"]
ROLES = ("site", "server", "audit")
PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def main() -> None:
    """Print a row for each role."""
    options = parser(__doc__).parse_args()
    project = tomllib.loads(PROJECT.read_text())["project"]
    torch = set(closure(["torch"]))
    rows = []
    for role in ROLES:
        found = closure(requirements(project, role))
        sizes = {name: size(each) for name, each in found.items()}
        rows.append(
            {
                "role": role,
                "packages": len(found),
                "MB": round(sum(sizes.values())),
                "MB without torch's": round(sum(s for n, s in sizes.items() if n not in torch)),
            }
        )
    emit(rows, COLUMNS, as_json=options.json)


def requirements(project: dict[str, Any], role: str) -> list[str]:
    """Return what ``bract[role]`` requires, the roles that it includes resolved."""
    found = list(project["dependencies"])
    for wanted in project["optional-dependencies"][role]:
        inner = re.fullmatch(r"bract\[(\w+)\]", wanted)
        found += requirements(project, inner[1]) if inner else [wanted]
    return found


def closure(wanted: list[str]) -> dict[str, Distribution]:
    """Return the installed packages that requirements lead to, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(each) for each in wanted]
    while left:
        requirement = left.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            found[name] = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        for line in found[name].requires or []:
            inner = Requirement(line)
            extras = ("", *requirement.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                left.append(inner)
    return found


def size(found: Distribution) -> float:
    """Return the megabytes of a package's files."""
    paths = [Path(str(found.locate_file(file))) for file in found.files or []]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


if __name__ == "__main__":
    main()
