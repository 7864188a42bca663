"""Seconds a round through real processes: FedAvg against FedBoosting, with and without capture.

    python benchmarks/rounds.py [--rounds 8] [--repeats 2] [--clients 3] [--capture] [--json]

Starts a SuperLink and one SuperNode a client on this machine for every measurement, as `bract run`
does. What is compared runs in turn within each repeat; the first round of a run, in which caches
fill, is left out; the figure is the median over all other rounds. As the capture hook costs less
than rounds differ by, ``--capture`` also times the hook alone, in this process, on the messages of
the same federation, and sets it against the measured round.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from results_io import emit, note, parser

from bract.cli.launcher import Launch
from bract.cli.training import run_federation
from bract.client.app import app
from bract.config import FederationConfig, build_config, dump_config
from bract.rundir import RunDirectory
from bract.server.app import Federation
from bract.server.hook import Recorder
from bract.server.loopback import LoopbackGrid


def main() -> None:
    """Measure in turn, then print the table or JSON."""
    arguments = parser(__doc__, "rounds", picture=False)
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--clients", type=int, default=3)
    arguments.add_argument(
        "--capture", action="store_true", help="measure the capture hook on and off"
    )
    arguments.add_argument("--cold", action="store_true", help="without the fork server")
    options = arguments.parse_args()
    strategies = ("fedavg", "fedboosting")
    captures = (False, True) if options.capture else (False,)
    seconds: dict[tuple[bool, str], list[float]] = {}
    for repeat in range(options.repeats):
        for capture in captures:
            for strategy in strategies:
                measured = measure(strategy, capture, options)
                seconds.setdefault((capture, strategy), []).extend(measured)
                note(
                    f"repeat {repeat + 1} {strategy} capture={capture}: "
                    f"{statistics.median(measured):.2f} s a round"
                )
    rows = [row(key, values, seconds) for key, values in seconds.items()]
    if options.capture:
        rows += [hook_row(strategy, seconds[False, strategy], options) for strategy in strategies]
    emit(
        rows,
        (
            "setup",
            "strategy",
            "seconds_per_round",
            "fastest",
            "slowest",
            "against_fedavg",
            "against_no_capture",
        ),
        as_json=options.json,
    )


def measure(strategy: str, capture: bool, options: Any) -> list[float]:
    """Run one federation; return the seconds of every round but the first."""
    config = configured(strategy, capture, options)
    with tempfile.TemporaryDirectory() as folder:
        run = run_federation(config, Path(folder), Launch(warm=not options.cold))
        return [row["seconds"] for row in run.metrics() if row["round"] >= 2]


def configured(strategy: str, capture: bool, options: Any) -> FederationConfig:
    """Return the federation that is measured."""
    return build_config(
        {
            "name": "rounds",
            "clients": options.clients,
            "rounds": options.rounds,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "strategy": {"name": strategy},
            "capture": {"enabled": capture},
        }
    )


def hook_row(strategy: str, plain: list[float], options: Any) -> dict[str, Any]:
    """Return a row with the seconds a round that are spent inside the hook."""
    config = configured(strategy, True, options)
    spent = 0.0

    class Timed(Recorder):
        def received(self, replies: Any) -> None:
            nonlocal spent
            started = time.perf_counter()
            super().received(replies)
            spent += time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder, patch("bract.server.hook.Recorder", Timed):
        run = RunDirectory(folder)
        run.create(config)
        nodes = [{"partition-id": i} for i in range(options.clients)]
        grid = LoopbackGrid(app, nodes, {"federation": dump_config(config)})
        Federation(config, run).train(grid)
    hook, median = spent / options.rounds, statistics.median(plain)
    return {
        "setup": "capture hook alone",
        "strategy": strategy,
        "seconds_per_round": round(hook, 4),
        "against_no_capture": round(1 + hook / median, 4),
    }


def row(
    key: tuple[bool, str], values: list[float], seconds: dict[tuple[bool, str], list[float]]
) -> dict[str, Any]:
    """Return one row; the ratios are of medians."""
    capture, strategy = key
    median = statistics.median(values)
    return {
        "setup": f"capture {'on' if capture else 'off'}",
        "strategy": strategy,
        "seconds_per_round": round(median, 3),
        "fastest": round(min(values), 3),
        "slowest": round(max(values), 3),
        "rounds": len(values),
        "against_fedavg": round(median / statistics.median(seconds[capture, "fedavg"]), 3),
        "against_no_capture": round(median / statistics.median(seconds[False, strategy]), 3),
    }


if __name__ == "__main__":
    main()
