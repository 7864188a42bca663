"""Frontier that `bract harden` found: leakage, accuracy and cost of what was attacked in full.

    bract harden cli/demo.yaml --space examples/harden/space.yaml
    python -m experiments.hardening runs/demo-harden/harden.json [--json]

``share high`` is the upper limit of the share of images that could have leaked; ``whole search``
counts candidates, federations and seconds, and those that leaked more than to cheaper attackers.
"""

from collections import Counter
from pathlib import Path

from bract_harden.records import Candidate, Hardening
from experiments.harness.command import emit, parser
from experiments.harness.result import Row

COLUMNS = (
    *("name", "title", "frontier", "accuracy", "leak", "leaked", "scored", "share_high"),
    *("attack", "seconds", "dropped"),
)


def main() -> None:
    """Print a row for each candidate that got the full attack, and one of the whole search."""
    arguments = parser(__doc__)
    arguments.add_argument("path", type=Path, help="harden.json of a finished search")
    options = arguments.parse_args()
    search = Hardening.parse_text(options.path.read_bytes(), source=str(options.path))
    rows = [row(c, search) for c in search.candidates if c.stage == "full"]
    stages = Counter(c.stage for c in search.candidates)
    rows.append(
        {
            "name": "whole search",
            "candidates": len(search.candidates),
            "stages": dict(sorted(stages.items())),
            "rose": sum((c.dropped or "").startswith("leakage rose") for c in search.candidates),
            "federations": search.federations,
            "seeds": search.searched.get("seeds"),
            "recommended": search.recommended,
            "cpu_seconds": search.cpu_seconds,
            "wall_seconds": search.wall_seconds,
        }
    )
    emit(rows, COLUMNS, as_json=options.json)


def row(one: Candidate, search: Hardening) -> Row:
    """Return what is committed of one candidate."""
    images = next(leak for leak in one.leaks if leak.question == "reconstruction")
    setting = {k: v for k, v in one.setting.items() if k != "defenses" and v is not None}
    return {
        "name": one.name,
        "title": one.title,
        "setting": setting,
        "frontier": one.name in search.frontier,
        "recommended": one.name == search.recommended,
        "accuracy": one.accuracy,
        "accuracy_low": one.accuracy_low,
        "accuracy_high": one.accuracy_high,
        "leak": images.value,
        "leak_low": images.low,
        "leak_high": images.high,
        "leaked": images.leaked,
        "scored": images.scored,
        "share_high": images.leaked_high,
        "attack": images.attack,
        "seconds": one.seconds,
        "bytes": one.bytes,
        "dropped": one.dropped,
        "violated": one.violated,
    }


if __name__ == "__main__":
    main()
