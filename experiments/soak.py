"""Memory and file descriptors of a federation's processes over many rounds with restarts.

    python -m experiments.soak [--rounds 200] [--every 10] [--json]

Two clients train the smallest model as real processes; every ``--every`` rounds the SuperNode of
one is ended (SIGTERM) and another one started in its place. After each round, every process that
lives as long as the run is looked at: megabytes that are its own (the unique set size, so that
what the fork server's children share does not count) and open file descriptors. A row says what a
process held early (median of rounds 11 to 30) and late (of the last 20): flat is late like early.
"""

import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bract.cli.launch.launcher import LocalFederation
from bract.config import build_config
from bract.errors import BractError
from bract.rundir import RunDirectory
from experiments.harness.command import emit, note, parser

COLUMNS = ["process", "rounds", "MB early", "MB late", "MB most", "fds early", "fds late"]
EARLY = slice(10, 30)
LATE = slice(-20, None)
RESTARTED = 1
Held = list[tuple[float, int]]
PATIENCE = 900.0
"""Seconds for which no round may end."""


class Restarting(LocalFederation):
    """A federation of which one SuperNode is ended and started again."""

    def _start_supernodes(self, address: str) -> None:
        self.address = address
        super()._start_supernodes(address)

    def restart(self, client: int) -> None:
        """End the latest SuperNode of a client and start another one."""
        name = f"client-{client}"
        handle = [p for p in self.processes._running if p.name == name][-1].handle
        handle.terminate()
        handle.wait()
        self._start_supernode(client, self.address, [])

    def watched(self) -> dict[str, psutil.Process]:
        """Return the processes that live as long as the run, by name.

        Flower's commands are children of the fork server; what was started waits for them, and
        both write to one log.
        """
        found = {"launcher": psutil.Process()}
        found["server app"] = psutil.Process(
            json.loads(self.run.server_lock_path.read_text())["pid"]
        )
        (forking,) = [p.handle.pid for p in self.processes._running if p.name == "fork-server"]
        found["fork server"] = psutil.Process(forking)
        children = found["fork server"].children()
        for name, what in (("superlink", "SuperLink"), ("client-0", "SuperNode")):
            log = (self.run.logs / f"{name}.log").absolute()
            own = [child for child in children if _log_of(child) == log]
            found[what] = min(own, key=lambda child: child.create_time())
        return found


def _log_of(process: psutil.Process) -> Path | None:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return None


def look(process: psutil.Process) -> tuple[float, int]:
    """Return a process's own megabytes and its open file descriptors."""
    return process.memory_full_info().uss / 1e6, process.num_fds()


def soak(folder: Path, rounds: int, every: int, held: dict[str, Held]) -> int:
    """Train, note in ``held`` what each process holds; return how many rounds lacked a client."""
    config = build_config(
        {
            "name": "soak",
            "clients": 2,
            "rounds": rounds,
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 1},
            "strategy": {"tolerate_failures": True},
        }
    )
    run = RunDirectory(folder / "soak")
    run.create(config)
    failed: list[BaseException] = []

    def train() -> None:
        try:
            federation.train(lambda _: None)
        except BractError as error:
            failed.append(error)

    with Restarting(config, run) as federation:
        training = threading.Thread(target=train)
        training.start()
        seen, moved = 0, time.monotonic()
        processes: dict[str, psutil.Process] = {}
        while training.is_alive() and not failed:
            done = max((row.round for row in run.metrics()), default=0)
            if time.monotonic() - moved > PATIENCE:
                raise SystemExit(f"no round for {PATIENCE:.0f} s after round {done}")
            if done == seen:
                time.sleep(0.2)
                continue
            seen, moved = done, time.monotonic()
            if done >= rounds:
                break
            processes = processes or federation.watched()
            for name, process in processes.items():
                held.setdefault(name, []).append(look(process))
            if done % every == 0:
                federation.restart(RESTARTED)
                note(f"round {done}: { ({n: v[-1] for n, v in held.items()}) }")
        training.join()
    if failed:
        raise failed[0]
    return sum(1 for row in run.metrics()[1:] if len(row.clients) < config.clients)


def row(name: str, held: Held) -> dict[str, Any]:
    """Return what a process held early and late."""
    early, late = held[EARLY], held[LATE]
    return {
        "process": name,
        "rounds": len(held),
        "MB early": round(statistics.median(m for m, _ in early), 1),
        "MB late": round(statistics.median(m for m, _ in late), 1),
        "MB most": round(max(m for m, _ in held), 1),
        "fds early": int(statistics.median(f for _, f in early)),
        "fds late": int(statistics.median(f for _, f in late)),
        "held": held,
    }


def main() -> None:
    """Soak, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=200)
    arguments.add_argument("--every", type=int, default=10)
    options = arguments.parse_args()
    begun = time.monotonic()
    held: dict[str, Held] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            lacking = soak(Path(folder), options.rounds, options.every, held)
            note(f"{lacking} of {options.rounds} rounds lacked a client")
        except KeyboardInterrupt:
            note("stopped before the last round")
    note(f"{time.monotonic() - begun:.0f} s")
    emit([row(n, h) for n, h in held.items()], COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
