"""CPU seconds of a round's stages: FedAvg and FedBoosting, all parties in one process.

    python -m experiments.timeline [--rounds 5] [--repeats 3] [--json]

Three clients, LeNet on the embedded digits, capture off. bract's own ClientApp and server run on
`LoopbackGrid`, one after another, so seconds are those of the work itself: what Flower's processes
add (a message phase's polls, the start of an app, transfers) is in none of them. Spans are those of
`bract run --profile`, on the process's CPU clock, of all rounds but the first. ``cpu`` is the sum
of a stage over the clients of one round, median over the repeats; ``times`` how often it occurs a
round. The row ``round`` is all CPU seconds of a round, with what no span covers.
"""

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from bract.client.app import app
from bract.config import build_config, dump_config
from bract.process import timeline
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.result import Row

STRATEGIES = ("fedavg", "fedboosting")
JUDGED = "judge and keep the global model"
COLUMNS = ("strategy", "stage", "cpu", "times")


def main() -> None:
    """Run both strategies in turn; print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=3)
    options = parse(arguments)
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.repeats):
        for strategy in STRATEGIES:
            for stage, figures in profiled(strategy, options.rounds).items():
                found[strategy, stage].append(figures)
    rows: list[Row] = [
        {
            "strategy": strategy,
            "stage": stage,
            "cpu": statistics.median(cpu for cpu, _ in figures),
            "times": statistics.median(times for _, times in figures),
            "rounds": options.rounds - 1,
            "repeats": options.repeats,
        }
        for (strategy, stage), figures in found.items()
    ]
    rows.sort(key=lambda row: (row["strategy"], -row["cpu"]))
    emit(rows, COLUMNS, as_json=options.json)


def profiled(strategy: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Run one federation; return CPU seconds and occurrences a round by stage."""
    config = build_config(
        {
            "name": "timeline",
            "rounds": rounds,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "strategy": {"name": strategy},
            "capture": {"enabled": False},
        }
    )
    clock = SimpleNamespace(monotonic_ns=time.process_time_ns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spans = folder / "profile"
        spans.mkdir()
        run = RunDirectory(folder / "run")
        run.create(config)
        nodes: list[dict[str, bool | float | int | str]] = [
            {"partition-id": i, "state-dir": str(folder / f"state-{i}")}
            for i in range(config.clients)
        ]
        grid = LoopbackGrid(app, nodes, {"federation": dump_config(config)})
        with (
            patch.dict(os.environ, {timeline.FOLDER: str(spans)}),
            patch.object(timeline, "time", clock),
        ):
            Federation(config, run).train(grid)
        trace = timeline.merge(spans, folder / "profile.json")
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    judged = sorted(e["ts"] + e["dur"] for e in events if e["name"] == JUDGED)
    # The first is the model before training, the second that of round 1.
    begin, end = judged[1], judged[-1]
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        if begin <= event["ts"] < end:
            sums[event["name"]] += event["dur"] / 1e6
            counts[event["name"]] += 1
    later = rounds - 1
    whole = (end - begin) / 1e6 / later
    note(f"{strategy}: {whole:.3f} CPU seconds a round")
    stages = {stage: (sums[stage] / later, counts[stage] / later) for stage in sums}
    return {"round": (whole, 1.0)} | stages


if __name__ == "__main__":
    main()
