"""Memory of a site and of a SuperLink that wait, and after a round, process by process.

    python -m experiments.site_memory [--load start message each] [--json]

Starts a SuperLink and one SuperNode as `bract superlink` and `bract supernode` do, looks at their
processes once they have come to rest, trains one round of the demo's LeNet, and looks again.
``MB`` counts what processes share once: memory that no file backs (the proportional shares of
``smaps``, which only processes forked from each other share), plus for each mapped file the most
that one process holds of it, so that other programs on the machine which map the same libraries
change nothing. ``private MB`` is a process's own (USS), ``PSS`` its proportional share. ``torch``
is the number of processes that have torch's library mapped without having inherited it.
``--load default`` leaves the option out, as releases without it need.
"""

import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from bract.cli.launch.launcher import Launch
from bract.cli.launch.reaper import marked_processes
from bract.cli.run import run_federation
from bract.config import build_config
from experiments.deployed import PLAIN, deployment
from experiments.harness.command import emit, note, parser
from experiments.harness.result import Row

COLUMNS = ["load", "when", "party", "process", "MB", "private MB", "PSS", "RSS", "torch"]
REST = 12.0
"""Seconds without a process that computes, after which memory is looked at."""


def main() -> None:
    """Measure each way of loading, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--load", nargs="+", default=["start", "message", "each"])
    options = arguments.parse_args()
    rows = []
    for load in options.load:
        mark = uuid.uuid4().hex
        with deployment(PLAIN, 1, mark=mark, load=None if load == "default" else load) as place:
            rows += looked_at(mark, load, "waiting")
            with tempfile.TemporaryDirectory() as runs:
                run_federation(
                    build_config(
                        {
                            "name": "memory",
                            "clients": 1,
                            "rounds": 1,
                            "model": {"name": "lenet-strided", "activation": "relu"},
                        }
                    ),
                    Path(runs),
                    Launch(superlink=str(place)),
                )
            rows += looked_at(mark, load, "after a round")
    emit(rows, COLUMNS, as_json=options.json)


def looked_at(mark: str, load: str, when: str) -> list[Row]:
    """Return rows of all processes, and one for each party, once they rest."""
    rest(mark)
    parties: dict[str, list[tuple[str, psutil.Process]]] = {"site": [], "SuperLink": []}
    for process in marked_processes(mark):
        party, name = role(process)
        parties[party].append((name, process))
    rows = []
    for party, found in parties.items():
        about: Row = {"load": load, "when": when, "party": party}
        looks = [look(process) for _, process in found]
        files: Counter[str] = Counter()
        for each in looks:
            for path, size in each["files"].items():
                files[path] = max(files[path], size)
        for (name, _), each in zip(found, looks, strict=True):
            rows.append({**about, "process": name, **figures(each)})
        rows.append(
            {
                **about,
                "process": "all",
                "MB": round(sum(e["anonymous"] for e in looks) + files.total(), 1),
                "private MB": round(sum(e["private"] for e in looks), 1),
                "PSS": round(sum(e["pss"] for e in looks), 1),
                "RSS": round(sum(e["rss"] for e in looks), 1),
                "torch": torches([process for _, process in found]),
            }
        )
        note(f"{load}, {when}: {party} {rows[-1]['MB']} MB")
    return rows


def figures(found: dict[str, Any]) -> Row:
    """Return one process's columns; its shared pages are in the row of all."""
    return {
        "private MB": round(found["private"], 1),
        "PSS": round(found["pss"], 1),
        "RSS": round(found["rss"], 1),
        "torch": int(found["torch"]),
    }


def rest(mark: str) -> None:
    """Wait until the processes have used next to no time for `REST` seconds."""

    def used() -> float:
        times = [process.cpu_times() for process in marked_processes(mark)]
        return sum(t.user + t.system for t in times)

    for _ in range(20):
        before = used()
        time.sleep(REST)
        if abs(used() - before) < 0.1 * REST:
            return


def role(process: psutil.Process) -> tuple[str, str]:
    """Return whose process this is, and what it does."""
    line = process.cmdline()
    above = [process, *process.parents()]
    lines = [" ".join(p.cmdline()) for p in above]
    party = "site" if any("flower-supernode" in found for found in lines) else "SuperLink"
    if any("shim.py" in part for part in line):
        return party, "shim"
    if any(part.endswith("fork_server") for part in line) and "--beside" not in line:
        return party, "fork server"
    if "--beside" in line:
        depth = sum("--beside" in found for found in lines)
        return party, ("SuperNode", "fork server", "superexec")[min(depth, 3) - 1]
    if "flower-superexec" in line:
        return party, "superexec"
    return party, "SuperNode" if party == "site" else "SuperLink"


def torches(processes: list[psutil.Process]) -> int:
    """Return how many processes have imported torch; one forked from such a one has not."""
    found = {p.pid: p.cmdline() for p in processes if look(p)["torch"]}
    return sum(found.get(p.ppid()) != p.cmdline() for p in processes if p.pid in found)


def look(process: psutil.Process) -> dict[str, Any]:
    """Return one process's megabytes, from ``smaps``."""
    found: dict[str, Any] = {"private": 0.0, "pss": 0.0, "rss": 0.0}
    files: dict[str, float] = {}
    path, resident = "", 0.0
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            path = rest[4] if len(rest) > 4 else ""
            continue
        if rest[-1] != "kB":
            continue
        size = int(rest[0]) / 1024
        if head == "Rss:":
            resident = size
            found["rss"] += size
        elif head == "Pss:":
            found["pss"] += size
        elif head in ("Private_Clean:", "Private_Dirty:"):
            found["private"] += size
        elif head == "Anonymous:" and path.startswith("/"):
            files[path] = files.get(path, 0.0) + (resident - size)
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    shares = {t.split()[0]: t.split()[1] for t in rollup.splitlines()[1:]}
    found["anonymous"] = int(shares["Pss_Anon:"]) / 1024
    found["files"] = files
    found["torch"] = any(name.endswith("/libtorch_cpu.so") for name in files)
    return found


if __name__ == "__main__":
    main()
