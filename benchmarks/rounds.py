"""Seconds a round through real processes: FedAvg against FedBoosting, with and without capture.

    python benchmarks/rounds.py [--rounds 5] [--repeats 3] [--clients 3] [--capture] [--json]

Starts a SuperLink and one SuperNode a client on this machine for every measurement, as `bract run`
does. What is compared runs in turn within each repeat, in reverse order every other time; the
first round of a run, in which caches fill, is left out. A ratio is taken within each repeat, from
medians over rounds; given are its median over the repeats and all of them, because other work on
the machine can move a round by more than what is compared. As the capture hook costs less than
rounds differ by, ``--capture`` also times the hook alone, in this process, on the messages of the
same federation, and sets it against the fastest round that was measured.
"""

import logging
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

STRATEGIES = ("fedavg", "fedboosting")
Setup = tuple[bool, str]


def main() -> None:
    """Measure in turn, then print the table or JSON."""
    logging.basicConfig(level=logging.WARNING)
    arguments = parser(__doc__, "rounds", picture=False)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--clients", type=int, default=3)
    arguments.add_argument(
        "--capture", action="store_true", help="measure the capture hook on and off"
    )
    arguments.add_argument("--cold", action="store_true", help="without the fork server")
    options = arguments.parse_args()
    captures = (False, True) if options.capture else (False,)
    setups = [(capture, strategy) for capture in captures for strategy in STRATEGIES]
    seconds: dict[Setup, list[list[float]]] = {setup: [] for setup in setups}
    for repeat in range(options.repeats):
        for setup in setups if repeat % 2 == 0 else reversed(setups):
            measured = measure(*setup, options)
            seconds[setup].append(measured)
            note(
                f"repeat {repeat + 1} {setup[1]} capture={setup[0]}: "
                f"{statistics.median(measured):.2f} s a round"
            )
    rows = [row(setup, seconds) for setup in setups]
    if options.capture:
        rows += [hook_row(strategy, seconds[False, strategy], options) for strategy in STRATEGIES]
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


def measure(capture: bool, strategy: str, options: Any) -> list[float]:
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


def hook_row(strategy: str, plain: list[list[float]], options: Any) -> dict[str, Any]:
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
    hook, fastest = spent / options.rounds, min(min(run) for run in plain)
    return {
        "setup": "capture hook alone",
        "strategy": strategy,
        "seconds_per_round": round(hook, 4),
        "against_no_capture": round(1 + hook / fastest, 4),
    }


def row(setup: Setup, seconds: dict[Setup, list[list[float]]]) -> dict[str, Any]:
    """Return one row."""
    capture, strategy = setup
    rounds = [value for run in seconds[setup] for value in run]
    against_fedavg = ratios(seconds[setup], seconds[capture, "fedavg"])
    against_plain = ratios(seconds[setup], seconds[False, strategy])
    return {
        "setup": f"capture {'on' if capture else 'off'}",
        "strategy": strategy,
        "seconds_per_round": round(statistics.median(rounds), 3),
        "fastest": round(min(rounds), 3),
        "slowest": round(max(rounds), 3),
        "rounds": len(rounds),
        "against_fedavg": round(statistics.median(against_fedavg), 3),
        "against_fedavg_by_repeat": against_fedavg,
        "against_no_capture": round(statistics.median(against_plain), 3),
        "against_no_capture_by_repeat": against_plain,
    }


def ratios(runs: list[list[float]], baseline: list[list[float]]) -> list[float]:
    """Return one ratio of medians a repeat."""
    pairs = zip(runs, baseline, strict=True)
    return [round(statistics.median(a) / statistics.median(b), 3) for a, b in pairs]


if __name__ == "__main__":
    main()
