"""Feed every parser of untrusted bytes and records many inputs, and count the outcomes.

The parsers and their inputs are those of tests/fuzz: valid documents, messages, keys and archives
with hostile values (huge numbers, NaN, deep nesting, other types), missing, doubled and renamed
keys, cut, flipped and spliced bytes. ``accepted`` inputs gave a valid object, ``refused`` ones the
documented error; ``other`` is any other exception, a message longer than a few lines, more than 2 s
of processor time, or a file or process outside of the test's folder.
"""

import random
import resource
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from experiments.harness.command import Finished, emit, note, note_row, parser

COLUMNS = ["parser", "room", "inputs", "accepted", "refused", "other", "seconds"]
SPARE = 4 << 30
ROOMS = tuple(
    f"bract.{room}"
    for room in ("cli", "client", "kits", "runtime", "report", "server", "strategies")
)
"""Code that parsers follow from, in addition to `ATTACKED`."""


def drawn(strategy: Any, seed: int) -> Iterator[Any]:
    """Yield inputs without end.

    Hypothesis' engine, which remembers what it drew and steers, costs more than most parsers; its
    strategies are drawn from by themselves here.
    """
    from hypothesis.control import BuildContext
    from hypothesis.errors import StopTest, UnsatisfiedAssumption
    from hypothesis.internal.conjecture.data import ConjectureData

    source = random.Random(seed)
    while True:
        data = ConjectureData(random=source)
        try:
            with BuildContext(data, is_final=False, wrapped_test=drawn):
                value = data.draw(strategy)
        except (StopTest, UnsatisfiedAssumption):
            continue
        yield value


def run(target: Any, inputs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Return the row of one parser, fed until its share of inputs or of time is used."""
    from fuzz.outcome import FaultError, outcome

    counts = {"accepted": 0, "refused": 0, "other": 0}
    faults: dict[str, tuple[str, str]] = {}
    started = time.perf_counter()
    for value in drawn(target.inputs, seed):
        try:
            counts[outcome(target, value)] += 1
        except FaultError as error:
            counts["other"] += 1
            faults.setdefault(str(error)[-400:], (str(error), repr(value)[:400]))
        spent = time.perf_counter() - started
        if sum(counts.values()) >= inputs or spent > seconds:
            break
    for why, shown in list(faults.values())[:8]:
        note(f"{target.name}: {why}\n  {shown}")
    row = {"parser": target.name, "room": target.room, "inputs": sum(counts.values())}
    return row | counts | {"seconds": round(time.perf_counter() - started, 1), "seed": seed}


def main() -> None:
    """Run the parsers that have no row yet, and print all rows."""
    options = parser(__doc__, "seed", "resume")
    options.add_argument("--inputs", type=int, default=1_000_000, help="of all parsers together")
    options.add_argument("--seconds", type=float, default=3600.0, help="the most for one parser")
    options.add_argument("--only", action="append", help="a parser's name; repeat it")
    given = options.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fuzz.parsers import PARSERS

    done = Finished(given.resume, *ROOMS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, resource.RLIM_INFINITY))
    chosen = [target for target in PARSERS if not given.only or target.name in given.only]
    settings = (-(-given.inputs // len(chosen)), given.seconds, given.seed)
    rows = [
        note_row(
            done.row([target.name, *settings], partial(run, target, *settings)),
            COLUMNS,
        )
        for target in chosen
    ]
    emit(rows, COLUMNS, as_json=given.json)


if __name__ == "__main__":
    main()
