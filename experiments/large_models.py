"""Rounds of large models with eight clients through real processes, against Flower's commands.

    python -m experiments.large_models [--cases resnet50:bract resnet50:stock] [--clients 8]
        [--rounds 3] [--resume rows.jsonl] [--json]

Every client takes one step on two small images (of GPT-2's shape: on two texts of the made-up
notes), so that seconds are those of moving, holding and adding the model. ``bract`` is `bract run`
with captures of one client, ``masks`` the same under masked sums without captures, ``paillier``
under Paillier, and ``stock`` the same app as ``bract`` under Flower's own commands as
they are installed. `AT_ONCE` clients train at a time, for this machine's memory: each further one
waits in its process with the message that it took. ``resumed`` kills the server app in the second
round, resumes the run, and looks at both parts. Memory is the most proportional share
(PSS, looked at every `LOOK` seconds) of the server app; of the SuperLink with what it started; and
of one client, SuperNode and apps together, the largest of all clients. All processes of a run are
in a control group of its own (root, and Linux with the controller ``cpuacct`` or control groups 2).
``MB`` is the model's file; ``times`` is the server app's memory over it, with what Python, Flower
and torch hold before a model is there taken away (`idle MB`). Seconds are of a round but the first,
in which processes import.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from bract.cli.launch.launcher import Launch
from bract.cli.run import run_federation
from bract.config import build_config
from bract.config.config import FederationConfig
from bract.errors import RunFailedError
from bract.models import create_model
from bract.rundir import RunDirectory
from experiments.deployed import stock
from experiments.harness.command import Finished, emit, note, parser
from experiments.harness.result import PRODUCT, Row
from experiments.many_sites import until
from experiments.round_cost import Group, group

MODELS = ("resnet50", "vit_b_16", "gpt2-lora")
MODES = ("bract", "stock", "masks", "paillier", "resumed")
CASES = (
    *("resnet50:bract", "resnet50:stock", "vit_b_16:bract", "gpt2-lora:bract"),
    *("resnet50:masks", "resnet50:resumed"),
)
GPT2 = "text-decoder(width=768,depth=12,heads=12,lora=8)"
COLUMNS = [
    *("model", "mode", "clients", "MB", "round s", "cpu s", "server MB", "times", "SuperLink MB"),
    *("client MB", "all MB", "captures MB"),
]

AT_ONCE = 2
LOOK = 0.25
SLOTS = "LARGE_MODELS_SLOTS"
"""Environment variable with the folder of the files of which a client locks one to train."""

_held: list[Any] = []


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50, at a client once it is its turn."""
    return _in_turn("resnet50")


def vit_b_16() -> nn.Module:
    """Return torchvision's ViT-B/16 for images of 32 pixels, at a client once it is its turn."""
    return _in_turn("vit_b_16")


def _in_turn(name: str) -> nn.Module:
    if Path(sys.argv[0]).name == "flwr-clientapp" and SLOTS in os.environ and not _held:
        _held.append(_slot(Path(os.environ[SLOTS])))  # until the process ends
    return create_model(name, classes=10, channels=1, image_size=32, activation="relu")


def _slot(folder: Path) -> Any:
    while True:
        for number in range(AT_ONCE):
            file = (folder / str(number)).open("w")
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            file.close()
        time.sleep(0.05)


def main() -> None:
    """Measure each case in a process of its own, then print the table or JSON."""
    arguments = parser(__doc__, "resume")
    every = [f"{model}:{mode}" for model, mode in itertools.product(MODELS, MODES)]
    arguments.add_argument("--cases", nargs="+", default=CASES, choices=every)
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        model, mode, folder = options.one
        train(configured(model, mode, options.clients, options.rounds), mode, Path(folder))
        return
    finished = Finished(options.resume, *PRODUCT, keep_older=True)
    rows = []
    for case in options.cases:
        model, mode = case.split(":")
        about = (model, mode, options.clients, options.rounds)
        rows.append(finished.get(about) or finished.add(about, measured(*about)))
        note(json.dumps(rows[-1]))
    emit(rows, COLUMNS, as_json=options.json)


def configured(model: str, mode: str, clients: int, rounds: int) -> FederationConfig:
    """Return the federation that is measured."""
    given: dict[str, Any] = {
        "name": "large",
        "clients": clients,
        "rounds": rounds,
        "data": {"image_size": 32, "validation": 0.0},
        "training": {"lr": 0.001, "local_steps": 1, "batch_size": 2},
        "capture": {"clients": ["client-1"]},
        "strategy": {"name": "fedavg", "timeout": 3000},
    }
    if model == "gpt2-lora":
        given |= {"model": {"name": GPT2}, "data": {"input": "text", "name": "clinical-notes"}}
    else:
        given |= {"model": {"name": f"{__spec__.name}:{model}"}}
    if mode in ("masks", "paillier"):
        given |= {"capture": {"enabled": False}, "encryption": mode}
    return build_config(given)


def train(config: FederationConfig, mode: str, folder: Path) -> None:
    """Run the federation; this process and all that it starts are in the control group."""
    with contextlib.ExitStack() as stack:
        launch = Launch()
        if mode == "stock":
            launch = Launch(superlink=stack.enter_context(stock(config.clients, config.model.name)))
        if mode != "resumed":
            run_federation(config, folder, launch)
            return
        run = RunDirectory(folder / config.name)
        killing = threading.Thread(target=_kill, args=(run,), daemon=True)
        killing.start()
        with contextlib.suppress(RunFailedError):
            run_federation(config, folder, launch)
        run_federation(config, folder, launch, resume=True)


def _kill(run: RunDirectory) -> None:
    until(lambda: any(row.round == 1 for row in run.metrics()), within=1200)
    time.sleep(2.0)
    psutil.Process(int(json.loads(run.server_lock_path.read_text())["pid"])).kill()


def measured(model: str, mode: str, clients: int, rounds: int) -> Row:
    """Run one federation in a process and a control group of its own; return its row."""
    with tempfile.TemporaryDirectory() as name, group() as joined:
        folder = Path(name)
        run = RunDirectory(folder / "runs" / "large")
        (folder / "slots").mkdir()
        line = [sys.executable, "-m", __spec__.name, "--clients", str(clients)]
        line += ["--rounds", str(rounds), "--one", model, mode, str(folder / "runs")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                line,
                preexec_fn=joined.join,
                stdout=log,
                stderr=log,
                env=os.environ
                | {"PYTHONPATH": str(Path(__file__).parents[1])}  # for the models of this file
                | {SLOTS: str(folder / "slots"), "OMP_NUM_THREADS": "1"},
            )
            look = Look(run, joined)
            while process.poll() is None:
                look.look(joined.used())
                time.sleep(LOOK)
        if process.returncode:
            raise SystemExit(f"{model}, {mode}: {(folder / 'log').read_text()[-3000:]}")
        rows = [row for row in run.metrics() if row.round]
        file = run.models / "last.safetensors"
        size = (file.stat().st_size if file.exists() else bytes_of(model)) / 1e6
        kept = [p for p in run.captures.rglob("*") if p.is_file()]
        captures = sum(path.stat().st_size for path in kept) / 1e6
        seconds = [row.seconds or 0.0 for row in rows if row.round >= 2]
        answers = [len(row.clients) for row in rows]
    most = {party: round(value, 1) for party, value in look.most.items()}
    return {
        "model": model,
        "mode": mode,
        "clients": clients,
        "MB": round(size, 1),
        "rounds": [round(value, 2) for value in seconds],
        "round s": round(statistics.median(seconds), 2),
        "cpu s": look.seconds_a_round(),
        "answers": answers,
        "server MB": most["server"],
        "idle MB": round(look.idle, 1),
        "own MB": most["no"],
        "times": round((most["no"] - look.idle) / size, 2),
        "SuperLink MB": most["SuperLink"],
        "client MB": most["client"],
        "all MB": most["all"],
        "captures MB": round(captures, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def bytes_of(model: str) -> int:
    """Return the bytes of a model's arrays, where ciphertexts leave the server no file of it."""
    name = GPT2 if model == "gpt2-lora" else model
    made = create_model(name, classes=10, channels=1, image_size=32, activation="relu")
    return sum(array.nbytes for array in made.state_dict().values())


class Look:
    """What the parties of one run hold at the most, in megabytes.

    Attributes
    ----------
    most
        By party: ``server`` (the server app), ``SuperLink``, ``client`` (the largest), ``all``.
    idle
        What the server app held when it was first seen, before it has a model.
    """

    def __init__(self, run: RunDirectory, group: Group) -> None:
        self._run, self._group = run, group
        self.most: dict[str, float] = defaultdict(float)
        self.idle = 0.0
        self._ends: list[float] = []

    def look(self, seconds: float) -> None:
        """Look at all processes; ``seconds`` is the processor time that they took so far."""
        with contextlib.suppress(OSError, ValueError):
            while len(self._ends) < len(self._run.metrics()):
                self._ends.append(seconds)
        server = -1
        with contextlib.suppress(OSError, ValueError, KeyError):
            server = int(json.loads(self._run.server_lock_path.read_text())["pid"])
        held: dict[str, float] = defaultdict(float)
        for pid in self._group.processes():
            with contextlib.suppress(OSError, psutil.Error, ValueError):
                size, anonymous = shares(pid)
                log = Path(f"/proc/{pid}/fd/1").readlink().stem
                held["server" if pid == server else log] += size
                held["no-file"] += anonymous if pid == server else 0.0
                held["all"] += size
        if held["server"] and not self.idle:
            self.idle = held["no-file"]
        for party, size in held.items():
            name = "SuperLink" if party == "superlink" else party.partition("-")[0]
            self.most[name] = max(self.most[name], size)

    def seconds_a_round(self) -> float:
        """Return the median processor time of a round but the first."""
        between = [b - a for a, b in itertools.pairwise(self._ends[1:])]
        return round(statistics.median(between), 1) if between else 0.0


def shares(pid: int) -> tuple[float, float]:
    """Return a process's proportional share of memory, and that which no file backs, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split()[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines}
    return found["Pss:"], found["Pss_Anon:"]


if __name__ == "__main__":
    main()
