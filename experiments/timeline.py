"""Where the seconds of a round go, by stage: FedAvg and FedBoosting through real processes.

    python -m experiments.timeline [--rounds 5] [--repeats 2] [--strategies NAME,NAME] [--json]

Each run is one of `bract run --profile` of three clients, LeNet on the embedded digits; the two
strategies run in turn. Spans of all rounds but the first are taken from its trace. A row is a stage
of one kind of process: ``seconds`` that it takes a round, summed over that kind's processes and
divided by the rounds, median over the repeats; ``times`` how often it occurs a round. Stages
within others (``run flwr-clientapp`` holds those of the client's app) are not added up. The row
``round`` is the server's own clock. Processes share two cores, so stages slow each other down.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from bract.cli.launch.launcher import Launch
from bract.cli.run import run_federation
from bract.config import build_config
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.result import Row

COLUMNS = ("strategy", "process", "stage", "seconds", "times")


def main() -> None:
    """Run both strategies in turn; print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--strategies", default="fedavg,fedboosting")
    options = parse(arguments)
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.repeats):
        for strategy in options.strategies.split(","):
            for stage, figures in profiled(strategy, options.rounds).items():
                found[strategy, *stage].append(figures)
    rows: list[Row] = [
        {
            "strategy": strategy,
            "process": process,
            "stage": stage,
            "seconds": round(statistics.median(s for s, _ in figures), 3),
            "times": round(statistics.median(n for _, n in figures), 2),
            "rounds": options.rounds - 1,
            "repeats": options.repeats,
        }
        for (strategy, process, stage), figures in found.items()
    ]
    rows.sort(key=lambda row: (row["strategy"], row["process"], -row["seconds"]))
    emit(rows, COLUMNS, as_json=options.json)


def profiled(strategy: str, rounds: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Run one federation; return seconds and occurrences a round by process and stage."""
    config = build_config(
        {
            "name": "timeline",
            "rounds": rounds,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "strategy": {"name": strategy},
            "capture": {"enabled": False},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = run_federation(config, Path(folder), Launch(profile=True))
        seconds = [row.seconds or 0.0 for row in run.metrics() if row.round >= 2]
        (trace,) = run.root.rglob("profile.json")
        events = json.loads(trace.read_text())["traceEvents"]
    note(f"{strategy}: {statistics.median(seconds):.2f} s a round")
    stages = stages_of(events, rounds)
    return {("server", "round"): (statistics.median(seconds), 1.0)} | stages


def stages_of(
    events: list[dict[str, Any]], rounds: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return seconds and occurrences a round by kind of process and stage, without round 1."""
    judged = sorted(
        e["ts"] + e["dur"] for e in events if e["name"] == "judge and keep the global model"
    )
    # The first is the model before training, the second that of round 1.
    begin, end = judged[1], judged[-1]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    sums: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        if event.get("ph") != "X" or not begin <= event["ts"] < end:
            continue
        whose = names.get(event["pid"], "")
        kind = "client" if whose.startswith("client-") else "server"
        stage = " ".join(word for word in event["name"].split() if not word.isdigit())
        sums[kind, stage] += event["dur"] / 1e6
        counts[kind, stage] += 1
    return {key: (sums[key] / (rounds - 1), counts[key] / (rounds - 1)) for key in sums}


if __name__ == "__main__":
    main()
