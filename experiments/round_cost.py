"""What a federation of real processes costs, in processor seconds: this checkout against another.

    python -m experiments.round_cost --before CHECKOUT [--rounds 6] [--repeats 3] [--json]

Three clients, `lenet-strided` on the embedded digits, captures on: FedAvg, FedBoosting and FedAvg
under Paillier, as `bract run --profile` runs them, in a control group of their own that counts the
processor time of all processes, those that have ended included (root, and Linux with the
controller ``cpuacct`` or control groups 2). Both checkouts take turns within each repeat, in
reverse order every other time. ``cpu`` and ``seconds`` are of a round, the median over the rounds
but the first; ``start`` is to the end of round 1, from the start of the command, its imports
included. ``requests`` of SuperNodes and apps that brought something are counted in the profile.
Ratios are within one repeat, the median over the repeats. Other work on the machine lengthens
seconds and, through caches, processor seconds too: ``load`` is the median of the load averages.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bract.errors import BractError
from bract.runtime.timeline import REQUESTS
from experiments.harness.command import emit, note, parser
from experiments.harness.result import Row

SETUPS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedboosting": {"strategy": {"name": "fedboosting"}},
    "fedavg, paillier": {"encryption": "paillier"},
}
FIGURES = ("cpu", "seconds", "requests", "start_cpu", "start_seconds")
_GROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    """Run both checkouts in turn; print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--before", type=Path, required=True, help="with a .venv of its own")
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    commands = {
        "before": options.before / ".venv" / "bin" / "bract",
        "after": Path(sys.executable).with_name("bract"),
    }
    found: dict[tuple[str, str], list[Row]] = {}
    for repeat in range(options.repeats):
        for setup in SETUPS:
            for version in sorted(commands, reverse=repeat % 2 == 0):
                row = measured(commands[version], setup, options.rounds)
                found.setdefault((setup, version), []).append(row)
                note(f"repeat {repeat + 1}, {setup}, {version}: {row}")
    rows = [summary(found, setup, version) for setup, version in found]
    columns = ("setup", "version", *FIGURES, "cpu_against_before", "seconds_against_before")
    emit(rows, columns, as_json=options.json)


def summary(found: dict[tuple[str, str], list[Row]], setup: str, version: str) -> Row:
    """Return medians over the repeats, and the ratios to the other version."""
    own, before = found[setup, version], found[setup, "before"]
    row: Row = {"setup": setup, "version": version, "repeats": len(own)}
    for name in (*FIGURES, "load"):
        row[name] = round(statistics.median(r[name] for r in own), 3)
    for name in FIGURES:
        ratios = [round(a[name] / b[name], 3) for a, b in zip(own, before, strict=True)]
        row |= {f"{name}_against_before": statistics.median(ratios), f"{name}_ratios": ratios}
    return row


def measured(bract: Path, setup: str, rounds: int) -> Row:
    """Run one federation; return its figures."""
    with tempfile.TemporaryDirectory() as name, group() as joined:
        folder = Path(name)
        config = {
            "name": "cost",
            "clients": 3,
            "rounds": rounds,
            "model": {"name": "lenet-strided", "activation": "relu"},
            **SETUPS[setup],
        }
        (folder / "f.yaml").write_text(json.dumps(config))
        rows = folder / "runs" / "cost" / "metrics.jsonl"
        began, loads = time.monotonic(), [os.getloadavg()[0]]
        process = subprocess.Popen(
            [bract, "run", folder / "f.yaml", "--runs", folder / "runs", "--profile"],
            stdout=subprocess.DEVNULL,
            preexec_fn=joined.join,
        )
        ends: list[tuple[float, float]] = []
        while process.poll() is None:
            there = rows.read_bytes().count(b"\n") if rows.is_file() else 0
            while len(ends) < there:
                ends.append((time.monotonic(), joined.used()))
            time.sleep(0.02)
        loads.append(os.getloadavg()[0])
        if process.returncode or len(ends) != rounds + 1:
            raise BractError(
                f"{bract} run ended with {process.returncode} after {len(ends)} rows",
                code="run-failed",
            )
        trace = json.loads((rows.parent / "profile.json").read_text())["traceEvents"]
        requests = sum(event["name"] in REQUESTS for event in trace)
    later = list(itertools.pairwise(ends[1:]))
    return {
        "cpu": statistics.median(b[1] - a[1] for a, b in later),
        "seconds": statistics.median(b[0] - a[0] for a, b in later),
        "requests": requests / rounds,
        "start_cpu": ends[1][1],
        "start_seconds": ends[1][0] - began,
        "load": statistics.median(loads),
    }


class Group:
    """A control group: who starts a process passes `join` as its ``preexec_fn``."""

    def __init__(self) -> None:
        first = _GROUPS / "cpuacct"
        self._counts = first.is_dir()
        self._folder = (first if self._counts else _GROUPS) / f"bract-{os.getpid()}"
        try:
            self._folder.mkdir()
        except OSError as error:
            raise BractError(
                f"{self._folder}: no control group can be made there: {error}",
                code="file-unreadable",
            ) from error

    def join(self) -> None:
        """Put the calling process into the group, and with it all that it starts."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def processes(self) -> list[int]:
        """Return the processes that are in the group now."""
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def used(self) -> float:
        """Return the processor seconds of all processes so far, those that have ended included."""
        if self._counts:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        return int((self._folder / "cpu.stat").read_text().split()[1]) / 1e6

    def remove(self) -> None:
        """Remove the group once it is empty."""
        while self.processes():
            time.sleep(0.1)
        self._folder.rmdir()


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Make a control group; remove it once it is empty."""
    made = Group()
    try:
        yield made
    finally:
        made.remove()


if __name__ == "__main__":
    main()
