"""The search of `bract harden` against a grid of the same space: CPU time, and both frontiers.

    python -m experiments.hardening_grid [--seed N] [--json]

The grid gives every combination the full attack with all seeds; of a range it takes three levels.
The search takes any value of the range. ``met`` counts the frontier's points that a point of the
other frontier equals or beats, by the steps below which `bract harden` counts points as equal.
"""

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from bract.config import FederationConfig, build_config
from bract_harden.comparing import beats, equal
from bract_harden.configuration import InProcess
from bract_harden.records import Candidate
from bract_harden.search import Hardening
from bract_harden.space import Setting, Space
from bract_harden.space_file import Range, SpaceFile
from bract_harden.work import here
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.result import Row

COLUMNS = ("name", "candidates", "full", "federations", "cpu_seconds", "points", "met", "of")

LEVELS = (0.0, 0.5, 1.0)
"""Shares of a range at which the grid stands."""

BASE: dict[str, Any] = {
    "name": "grid",
    "truth": True,
    "rounds": 3,
    "clients": 3,
    "data": {
        "image_size": 8,
        "validation": 0.0,
        "partition": {"kind": "sizes", "sizes": [400, 300, 2]},
    },
    "model": {"name": "lenet-strided", "activation": "relu"},
    "training": {"batch_size": 8, "lr": 0.1},
    "audit": {"attacks": ["ig"], "clients": ["client-2"], "rounds": [1], "iterations": 200},
}
NOISE = {"name": "noise", "clip": 1.0, "std": {"low": 1e-3, "high": 1e-2, "log": True}}
PRUNING = {"name": "pruning", "ratio": {"low": 0.5, "high": 0.95}}
SPACE: dict[str, Any] = {
    "space": {"training.batch_size": [4, 8], "training.lr": [0.05, 0.1]},
    "defenses": [[], [NOISE], [PRUNING], ["guardian", NOISE]],
    "constraints": {"accuracy_loss": 0.05},
    "search": {
        **{"trials": 12, "seeds": 3, "points": 8, "frontier": 0, "together": 4},
        **{"cheap": {"iterations": 20}, "middle": {"iterations": 60}},
    },
}


def main() -> None:
    """Search and grid in one process, after one federation that counts for neither."""
    options = parse(parser(__doc__, "seed"))
    base = build_config(BASE | {"seed": options.seed}).as_own_word()
    with tempfile.TemporaryDirectory() as folder:
        warm, search, grid = (opened(Path(folder) / n, base) for n in ("warm", "search", "grid"))
        warm.run_grid([])
        search.run()
        grid.run_grid(combinations(grid.space))
        rows = [row("search", search, grid), row("grid", grid, search)]
    ratio = float(rows[1]["cpu_seconds"]) / float(rows[0]["cpu_seconds"])
    emit([*rows, {"name": "ratio", "cpu_seconds": ratio}], COLUMNS, as_json=options.json)


def opened(root: Path, base: FederationConfig) -> Hardening:
    """Return a search of the space in a folder."""
    root.mkdir()
    space = Space(base, SpaceFile.model_validate(SPACE))
    return Hardening(root, space, here(InProcess(base)), say=note)


def combinations(space: Space) -> list[Setting]:
    """Return every setting of the grid."""
    found: list[Setting] = []
    for start in space.starts():
        axes = space.axes(start)
        levels = [
            [among.at(share) for share in LEVELS] if isinstance(among, Range) else among
            for among in axes.values()
        ]
        found += [start | dict(zip(axes, values, strict=True)) for values in product(*levels)]
    return found


def row(name: str, own: Hardening, other: Hardening) -> Row:
    """Return what one of the two took, and how its frontier stands to the other's."""
    front, theirs = own.frontier(full=True), other.frontier(full=True)
    return {
        "name": name,
        "candidates": len(own.candidates),
        "full": sum(c.stage == "full" for c in own.candidates),
        "federations": sum(len(c.measures) for c in own.candidates),
        "cpu_seconds": sum(c.cpu_seconds or 0.0 for c in own.candidates),
        "points": len(front),
        "met": sum(met(one, theirs) for one in front),
        "of": len(front),
        "frontier": [
            {"title": c.title, "setting": c.setting, "accuracy": c.accuracy, "leak": c.leak}
            | {"seconds": c.seconds}
            for c in front
        ],
    }


def met(one: Candidate, others: list[Candidate]) -> bool:
    """Return whether one of the others is as good as a point in every respect."""
    return any(equal(other, one) or beats(other, one) for other in others)


if __name__ == "__main__":
    main()
