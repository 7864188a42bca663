"""Single settings of the demo's federation under the full attack of `bract harden`, beside it.

    python -m experiments.hardening_settings joins|secret [--seeds N] [--json]

``joins``: the small client trains from round 1, 3 or 5 on, and is attacked in its first round.
``secret``: AdaDefense with moments that start at zero, as in the paper, or after secret updates;
the adaptive attacker knows all but these.
"""

import tempfile
from pathlib import Path
from typing import Any

from bract.config import FederationConfig, load_config
from bract_harden.configuration import InProcess
from bract_harden.records import Candidate
from bract_harden.search import Hardening
from bract_harden.space import Space
from bract_harden.space_file import SpaceFile
from bract_harden.work import here
from experiments.hardening_grid import combinations
from experiments.harness.command import emit, note, parser
from experiments.harness.result import Row

COLUMNS = (
    "joins",
    "secret_updates",
    "accuracy",
    "leak",
    "leaked",
    "scored",
    "share_high",
    "attack",
)
DEMO = Path("cli/demo.yaml")
SPACES: dict[str, dict[str, Any]] = {
    "joins": {
        "space": {"strategy.joins": [{}, {"client-2": 3}, {"client-2": 5}]},
        "defenses": [[]],
    },
    "secret": {
        "space": {},
        "defenses": [[{"name": "adadefense", "secret_updates": number}] for number in (0, 1, 2, 8)],
    },
}
"""Spaces of `bract harden` of which every combination is attacked; the first one is the control."""

FULL = {"attacks": ["grnn", "ig"], "iterations": 150, "clients": ["client-2"], "rounds": [1]}


def main() -> None:
    """Attack every setting with all seeds, in one process."""
    arguments = parser(__doc__)
    arguments.add_argument("name", choices=SPACES)
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args()
    content = SPACES[options.name]
    base = load_config(DEMO).as_own_word()
    base = base.model_copy(update={"defenses": content["defenses"][0]})
    search = {"seeds": options.seeds, "full": FULL}
    space = Space(base, SpaceFile.model_validate(content | {"search": search}))
    with tempfile.TemporaryDirectory() as folder:
        found = Hardening(Path(folder), space, here(InProcess(base)), say=note)
        found.run_grid(combinations(space))
        rows = [row(found.config(one), one) for one in found.candidates]
    emit(rows, COLUMNS, as_json=options.json)


def row(config: FederationConfig, one: Candidate) -> Row:
    """Return what was measured of one setting."""
    if one.error:
        return {"title": one.title, "error": one.error}
    found = next(leak for leak in one.leaks if leak.question == "reconstruction")
    return {
        "title": one.title,
        "joins": config.strategy.joins,
        "secret_updates": next((e["secret_updates"] for e in config.defenses), None),
        "accuracy": one.accuracy,
        "accuracy_low": one.accuracy_low,
        "accuracy_high": one.accuracy_high,
        "leak": found.value,
        "leak_low": found.low,
        "leak_high": found.high,
        "leaked": found.leaked,
        "scored": found.scored,
        "share_high": found.leaked_high,
        "attack": found.attack,
        "levels": found.levels,
        "seconds": one.seconds,
        "cpu_seconds": one.cpu_seconds,
    }


if __name__ == "__main__":
    main()
