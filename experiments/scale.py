"""Memory, disk and seconds of a simulation of many clients, round by round.

    python -m experiments.scale [--clients 1000 ...] [--a-round 20] [--rounds 20] [--model resnet20]
                               [--slopes] [--audit] [--json]

Every run is `bract run --simulate` on drawn pictures of 32 x 32 pixels, two a client. While it
trains, all of its processes are looked at once a second: resident megabytes (RSS, in which what
processes share counts for each of them) and megabytes with what they share counted once (PSS). A
round's row is the look at which the sum was highest. ``--slopes`` adds short runs with fewer and
more clients and with a larger model, from which the cost of a client and of a byte follows.
``--audit`` then runs `bract describe`, `bract audit` of the last round by `ATTACK` within `BUDGET`,
and `bract report` on the captures, each as a process of its own: seconds, its largest resident
megabytes, and megabytes of the page.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from bract.cli.launch.launcher import Launch
from bract.cli.launch.reaper import marked_processes
from bract.cli.launch.simulated import SimulatedFederation, clients_at_once
from bract.cli.run import check_feasible
from bract.config import FederationConfig, build_config
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow
from experiments.harness.command import emit, note, parser

COLUMNS = [
    *("clients", "a round", "model", "rounds", "MB early", "MB late", "MB most", "MB once"),
    *("server MB", "client MB", "start s", "round s", "captures MB", "state MB"),
]
IMAGES = 2
"""Pictures a client."""

EARLY, LATE = slice(1, 6), slice(-5, None)
"""Rounds whose median stands for the begin and the end; in the first one every process imports."""

PARTS = {
    "ray::ClientAppActor": "clients",
    "bract.runtime.fork_server": "fork server",
    "bract/runtime/shim.py": "fork server",
}
ATTACK, BUDGET = "ig", "2m"
"""Of the audit: an attack and its wall time."""

Look = dict[str, float]


def draw(folder: Path, clients: int) -> None:
    """Write training and test pictures of ten classes in folders that torchvision reads."""
    generator = np.random.default_rng(0)
    for split, count in (("train", IMAGES * clients), ("test", 100)):
        for number in range(count):
            place = folder / split / str(number % 10)
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            pixels[:, number % 8] = 255
            Image.fromarray(pixels).resize((32, 32)).save(place / f"{number:07d}.png")


def part_of(process: psutil.Process, server: int) -> str:
    """Return which part of a simulation a process is; the server app's has the number ``server``.

    It runs the engine too. The SuperLink is a child of the fork server and counts with it.
    """
    if process.pid in (psutil.Process().pid, server):
        return "server" if process.pid == server else "launcher"
    words = " ".join(process.cmdline())
    return next((name for mark, name in PARTS.items() if mark in words), "ray")


class Looking:
    """Looks at the processes of a federation once a second; keeps each round's highest sum."""

    def __init__(self, mark: str, run: RunDirectory) -> None:
        self._mark, self._run = mark, run
        self._stop = threading.Event()
        self.rounds: list[Look] = []
        self._highest: Look = {}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Look while the block runs."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def end_round(self, row: MetricsRow) -> None:
        """Keep what was seen since the last round."""
        found = self._highest or self.look()
        self._highest = {}
        if row.round:
            self.rounds.append({"round": row.round, "seconds": row.seconds or 0.0, **found})
            note(f"round {row.round}: { ({k: round(v) for k, v in found.items()}) } MB")

    def look(self) -> Look:
        """Return megabytes by part, their sum (rss), and that of what is counted once (pss)."""
        held: Look = {"rss": 0.0, "pss": 0.0}
        own, clients = psutil.Process(), 0
        try:
            server = int(json.loads(self._run.server_lock_path.read_text())["pid"])
        except (OSError, ValueError, KeyError):
            server = 0
        for process in [own, *marked_processes(self._mark)]:
            try:
                memory, part = process.memory_full_info(), part_of(process, server)
            except psutil.Error:
                continue
            held["rss"] += memory.rss / 1e6
            held["pss"] += memory.pss / 1e6
            held[part] = held.get(part, 0.0) + memory.pss / 1e6
            clients += part == "clients"
        held["client processes"] = clients
        return held

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            found = self.look()
            if found["rss"] > self._highest.get("rss", 0.0):
                self._highest = found


def configuration(
    folder: Path, clients: int, a_round: int, rounds: int, model: str
) -> FederationConfig:
    """Return the federation of one run, whose pictures lie in ``folder``."""
    return build_config(
        {
            "name": "scale",
            "clients": clients,
            "rounds": rounds,
            "data": {"name": "folder", "path": str(folder), "validation": 0.0},
            "model": {"name": model, "activation": "relu"},
            "training": {"batch_size": IMAGES, "local_epochs": 1},
            # Half a client more, so that no rounding leaves one out.
            "strategy": {"name": "fedavg", "fraction": min(1.0, (a_round + 0.5) / clients)},
        }
    )


def megabytes(folder: Path) -> float:
    """Return what the files of a folder hold."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6


def command(*words: str) -> tuple[float, float]:
    """Run a bract command to its end; return its seconds and its largest resident megabytes.

    Raises
    ------
    SystemExit
        With what it printed, where it fails.
    """
    begun = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bract.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"bract {' '.join(words)}: {log.read().decode()[-3000:]}")
    return time.monotonic() - begun, used.ru_maxrss / 1024


def judged(run: RunDirectory, rounds: int) -> dict[str, Any]:
    """Describe a run, audit its last round, write its page; return what that took."""
    root = str(run.root)
    found: dict[str, Any] = {}
    commands = {
        "describe": ("describe", root),
        "audit": (
            *("audit", root, "--rounds", str(rounds)),
            *("--attack", ATTACK, "--budget", BUDGET, "--yes"),
        ),
        "report": ("report", root),
    }
    for name, words in commands.items():
        seconds, most = command(*words)
        note(f"bract {name}: {seconds:.1f} s, {most:.0f} MB")
        found |= {f"{name} s": round(seconds, 1), f"{name} MB": round(most, 1)}
    page = run.root / "report.html"
    return found | {"page MB": round(page.stat().st_size / 1e6, 2)}


def measure(
    clients: int, a_round: int, rounds: int, model: str, *, audit: bool = False
) -> dict[str, Any]:
    """Train once, and audit if asked; return the row."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draw(folder / "pictures", clients)
        config = configuration(folder / "pictures", clients, a_round, rounds, model)
        begun = time.monotonic()
        check_feasible(config)
        checked = time.monotonic() - begun
        note(f"{clients} clients, {model}: checked in {checked:.1f} s")
        run = RunDirectory(folder / "scale")
        run.create(config)
        begun, started = time.monotonic(), []
        with SimulatedFederation(config, run, Launch(simulate=True)) as federation:
            looking = Looking(federation.processes._mark, run)

            def on_round(row: MetricsRow) -> None:
                started.append(time.monotonic() - begun)
                looking.end_round(row)

            with looking.going_on():
                federation.train(on_round)
        found = row(config, run, looking.rounds) | {
            "start s": round(started[0] + checked, 1),
            "check s": round(checked, 1),
        }
        return found | (judged(run, rounds) if audit else {})


def row(config: FederationConfig, run: RunDirectory, rounds: list[Look]) -> dict[str, Any]:
    """Return what a run held and left."""
    replies = sum(len(found.clients) for found in run.metrics())
    trained = len({name for found in run.metrics() for name in found.clients})
    sums = [found["rss"] for found in rounds]
    captures, state = megabytes(run.captures), megabytes(run.root / "state")
    late = rounds[LATE]

    def median(column: str) -> float:
        return round(statistics.median(found.get(column, 0.0) for found in late), 1)

    processes = max(1.0, median("client processes"))
    return {
        "clients": config.clients,
        "a round": round(replies / len(rounds)),
        "model": config.model.name,
        "model MB": round((run.models / "last.safetensors").stat().st_size / 1e6, 3),
        "at once": clients_at_once(config),
        "images": IMAGES * config.clients,
        "rounds": len(rounds),
        "MB early": round(statistics.median(sums[EARLY]), 1),
        "MB late": round(statistics.median(sums[LATE]), 1),
        "MB most": round(max(sums), 1),
        "MB once": median("pss"),
        "server MB": median("server"),
        "client MB": round(median("clients") / processes, 1),
        "rest MB": round(sum(median(p) for p in ("launcher", "fork server", "ray")), 1),
        "round s": round(statistics.median(found["seconds"] for found in rounds[1:]), 2),
        "captures MB": round(captures, 2),
        "capture MB": round(captures / replies, 3),
        "state MB": round(state, 2),
        "trained": trained,
        "state of one MB": round(state / trained, 3),
        "held": [{k: round(v, 1) for k, v in found.items()} for found in rounds],
    }


def main() -> None:
    """Measure, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, nargs="+", default=[1000])
    arguments.add_argument("--a-round", type=int, default=20)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--model", default="resnet20")
    arguments.add_argument("--slopes", action="store_true", help="more clients, a larger model")
    arguments.add_argument("--audit", action="store_true", help="describe and audit each run")
    options = arguments.parse_args()
    settings = [
        (clients, options.a_round, options.rounds, options.model) for clients in options.clients
    ]
    if options.slopes:
        clients = options.clients[0]
        settings += [
            (clients // 10, options.a_round, 6, options.model),
            (clients * 8, options.a_round, 6, options.model),
            (clients, options.a_round // 4, 4, "resnet18"),
        ]
    rows = [measure(*setting, audit=options.audit) for setting in settings]
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
