"""Feed every parser of untrusted bytes and records many inputs, and count what came of them.

The parsers and their inputs are those of tests/fuzz. ``accepted`` inputs gave a valid object,
``refused`` ones the documented error; ``other`` is any other exception, a message longer than a
few lines, more than 2 s of processor time, or a file or process outside of the test's folder.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from experiments.results_io import emit, note, parser

COLUMNS = ["parser", "room", "inputs", "accepted", "refused", "other", "seconds"]
SPARE = 4 << 30


def run(target: Any, inputs: int, seed: int) -> dict[str, Any]:
    """Return the row of one parser."""
    from fuzz.outcome import FaultError, outcome
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    counts = {"accepted": 0, "refused": 0, "other": 0}
    faults: dict[str, tuple[str, str]] = {}
    started = time.perf_counter()

    @seeded(seed)
    @settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def feed(value: object) -> None:
        try:
            counts[outcome(target, value)] += 1
        except FaultError as error:
            counts["other"] += 1
            faults.setdefault(str(error)[-400:], (str(error), repr(value)[:400]))

    feed()
    for error, value in list(faults.values())[:8]:
        note(f"{target.name}: {error}\n  {value}")
    seconds = round(time.perf_counter() - started, 1)
    row = {"parser": target.name, "room": target.room, "inputs": sum(counts.values())}
    return row | counts | {"seconds": seconds}


def main() -> None:
    """Run the parsers that have no row yet, and print all rows."""
    options = parser(__doc__, "fuzzing", picture=False)
    options.add_argument("--inputs", type=int, default=10_000, help="inputs a parser")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", action="append", help="a parser's name; repeat it")
    options.add_argument("--keep", type=Path, help="file of the rows done, to go on from")
    given = options.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fuzz.parsers import PARSERS

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, resource.RLIM_INFINITY))
    rows = []
    if given.keep and given.keep.is_file():
        rows = [json.loads(line) for line in given.keep.read_text().splitlines()]
    done = {row["parser"] for row in rows}
    for target in PARSERS:
        if target.name in done or (given.only and target.name not in given.only):
            continue
        row = run(target, given.inputs, given.seed)
        note(" ".join(f"{name}={value}" for name, value in row.items()))
        rows.append(row)
        if given.keep:
            with given.keep.open("a") as file:
                file.write(json.dumps(row) + "\n")
    emit(rows, COLUMNS, as_json=given.json)


if __name__ == "__main__":
    main()
