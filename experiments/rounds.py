"""Seconds a round through real processes: FedAvg against FedBoosting, with and without capture.

    python -m experiments.rounds [--rounds 5] [--repeats 3] [--clients 3] [--capture] [--live]
        [--stock] [--strategies fedavg,fedboosting] [--json]
    python -m experiments.rounds --tls --gateway [...]

Starts a SuperLink and one SuperNode a client on this machine for every measurement, as `bract run`
does. What is compared runs in turn within each repeat, in reverse order every other time; the
first round of a run, in which caches fill, is left out. A ratio is taken within each repeat, from
medians over rounds; given are its median over the repeats and all of them, because other work on
the machine can move a round by more than what is compared. As the capture hook costs less than
rounds differ by, ``--capture`` also times the hook alone, in this process, on the messages of the
same federation, and sets it against the fastest round that was measured. ``--live`` measures rounds
with the captures attacked during training (`audit.live_every: 1`, so that its process always has
work) against rounds that are captured alone. ``--stock`` measures the same app under Flower's own
commands as they are installed, with Flower's settings.

``--tls`` and ``--gateway`` measure a deployment instead (`bract superlink`, `bract supernode`, and
nginx before them, on this machine), with FedAvg: against the same processes without TLS.
"""

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from bract.cli.launch.launcher import Launch
from bract.cli.run import run_federation
from bract.client.app import app
from bract.config import FederationConfig, build_config, dump_config
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from bract.server.recorder import Recorder
from experiments.deployed import GATEWAY, PLAIN, TLS, deployment, stock
from experiments.harness.command import emit, note, parser
from experiments.harness.result import Row

STRATEGIES = ("fedavg", "fedboosting")
MODES = {
    "stock": "stock",
    "off": "capture off",
    "on": "capture on",
    "live": "capture and live audit",
}
Setup = tuple[str, str]
"""A key of `MODES`, and a strategy."""

T = TypeVar("T")


def main() -> None:
    """Measure in turn, then print the table or JSON."""
    logging.basicConfig(level=logging.WARNING)
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--clients", type=int, default=3)
    arguments.add_argument(
        "--capture", action="store_true", help="measure the capture hook on and off"
    )
    arguments.add_argument("--live", action="store_true", help="measure the live audit")
    arguments.add_argument(
        "--stock", action="store_true", help="measure Flower's own commands as well"
    )
    arguments.add_argument("--strategies", default=",".join(STRATEGIES))
    arguments.add_argument("--cold", action="store_true", help="without the fork server")
    arguments.add_argument("--tls", action="store_true", help="a deployment with TLS")
    arguments.add_argument("--gateway", action="store_true", help="a deployment behind nginx")
    options = arguments.parse_args()
    if options.tls or options.gateway:
        measure_deployed(options)
        return
    strategies = options.strategies.split(",")
    modes = ["stock"] * options.stock
    modes += ["off"] * (options.capture or not options.live)
    modes += ["on"] * (options.capture or options.live) + ["live"] * options.live
    setups = [(mode, strategy) for mode in modes for strategy in strategies]
    seconds = in_turn(setups, options.repeats, lambda setup: measure(*setup, options))
    rows = [row(setup, seconds) for setup in setups]
    if options.capture:
        rows += [hook_row(strategy, seconds["off", strategy], options) for strategy in strategies]
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
            "against_capture",
            "against_stock",
        ),
        as_json=options.json,
    )


def measure(mode: str, strategy: str, options: Any) -> list[float]:
    """Run one federation; return the seconds of every round but the first."""
    config = configured(strategy, mode, options)
    launch = Launch(fork_server=not options.cold)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if mode == "stock":
            launch = Launch(superlink=stack.enter_context(stock(options.clients)))
        run = run_federation(config, Path(folder), launch)
        return later_rounds(run)


def measure_deployed(options: Any) -> None:
    """Measure a deployment in turn, plain and as the options ask; print the table or JSON."""
    setups = [PLAIN, *([TLS] if options.tls else []), *([GATEWAY] if options.gateway else [])]

    def measure_one(setup: str) -> list[float]:
        config = configured("fedavg", "off", options)
        with deployment(setup, options.clients) as place, tempfile.TemporaryDirectory() as runs:
            run = run_federation(config, Path(runs), Launch(superlink=str(place)))
            return later_rounds(run)

    seconds = in_turn(setups, options.repeats, measure_one)
    rows = [
        {
            "setup": setup,
            "strategy": "fedavg",
            **figures(seconds[setup]),
            **against("plain", seconds[setup], seconds[PLAIN]),
        }
        for setup in setups
    ]
    columns = ("setup", "seconds_per_round", "fastest", "slowest", "rounds", "against_plain")
    emit(rows, columns, as_json=options.json)


def in_turn(
    setups: Sequence[T], repeats: int, measured: Callable[[T], list[float]]
) -> dict[T, list[list[float]]]:
    """Return the seconds of rounds by setup and repeat; the order is reversed every other time."""
    seconds: dict[T, list[list[float]]] = {setup: [] for setup in setups}
    for repeat in range(repeats):
        for setup in setups if repeat % 2 == 0 else setups[::-1]:
            found = measured(setup)
            seconds[setup].append(found)
            note(f"repeat {repeat + 1} {setup}: {statistics.median(found):.2f} s a round")
    return seconds


def later_rounds(run: RunDirectory) -> list[float]:
    """Return the seconds of every round but the first."""
    return [row.seconds or 0.0 for row in run.metrics() if row.round >= 2]


def figures(runs: list[list[float]]) -> Row:
    """Return median, least and most seconds over the rounds of all repeats."""
    rounds = [value for run in runs for value in run]
    return {
        "seconds_per_round": round(statistics.median(rounds), 3),
        "fastest": round(min(rounds), 3),
        "slowest": round(max(rounds), 3),
        "rounds": len(rounds),
    }


def against(name: str, runs: list[list[float]], baseline: list[list[float]]) -> Row:
    """Return the median over the repeats of the ratio of medians, and the ratios."""
    pairs = zip(runs, baseline, strict=True)
    ratios = [round(statistics.median(a) / statistics.median(b), 3) for a, b in pairs]
    return {
        f"against_{name}": round(statistics.median(ratios), 3),
        f"against_{name}_by_repeat": ratios,
    }


def configured(strategy: str, mode: str, options: Any) -> FederationConfig:
    """Return the federation that is measured."""
    return build_config(
        {
            "name": "rounds",
            "clients": options.clients,
            "rounds": options.rounds,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "strategy": {"name": strategy},
            "capture": {"enabled": mode in ("on", "live")},
            "audit": {"live_every": 1 if mode == "live" else None},
        }
    )


def hook_row(strategy: str, plain: list[list[float]], options: Any) -> Row:
    """Return a row with the seconds a round that are spent inside the hook."""
    config = configured(strategy, "on", options)
    spent = 0.0

    class Timed(Recorder):
        def received(self, replies: Any, **options: Any) -> None:
            nonlocal spent
            started = time.perf_counter()
            super().received(replies, **options)
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


def row(setup: Setup, seconds: dict[Setup, list[list[float]]]) -> Row:
    """Return one row."""
    mode, strategy = setup
    found: Row = {"setup": MODES[mode], "strategy": strategy, **figures(seconds[setup])}
    others = {
        "fedavg": (mode, "fedavg"),
        "no_capture": ("off", strategy),
        "capture": ("on", strategy),
        "stock": ("stock", strategy),
    }
    for name, other in others.items():
        if other in seconds:
            found |= against(name, seconds[setup], seconds[other])
    return found


if __name__ == "__main__":
    main()
