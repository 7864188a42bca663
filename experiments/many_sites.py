"""Seconds, memory, file descriptors and processor time of rounds with many real SuperNodes.

    python -m experiments.many_sites [--sites 10 25 50 100] [--a-round 20] [--rounds 5] [--late 2]
        [--tls] [--json]

Starts one SuperLink with a database, as kits do, and a SuperNode a site, each a process in a
network namespace of its own (`experiments.harness.network`). Sites are added from one number to the
next, a few at a time; at each number they wait first, and then `--a-round` of them, drawn anew each
round, train LeNet on the bundled digits. Where fifty trained at a time on two cores with other
work, Flower took their apps for dead. ClientApps are forked from one fork server for all sites,
since a hundred processes that import torch themselves do not fit on one machine: what a site's own
costs is in `experiments.site_memory`. Memory is the proportional share (PSS); processor time is
that of the process named, so it holds also where sites and server share cores, as they do here.
Seconds a round are those of this machine, whose cores train all clients.

``--late N`` has the first N sites that train in the second round wait until that round is over,
which a quorum of nine tenths closes (``grace`` 2 s), and counts whose late updates were refused by
name.
``--tls`` adds TLS and SuperNode authentication, as kits have. The row ``a site`` is a line through
the rows by least squares: the cost of each further site.
"""

import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch import nn

from bract.cli.launch.launcher import SUPERLINK_PORT, SUPERNODE_PORT, Launch
from bract.cli.launch.processes import Processes
from bract.cli.run import run_federation
from bract.config import FederationConfig, build_config
from bract.kits import kit as kits
from bract.kits.provisioning import provision
from bract.models import create_model
from bract.rundir import RunDirectory
from bract.runtime import sockets
from bract.runtime.children import command_line
from bract.runtime.flower import NODE_CONFIG
from bract.runtime.pinned import APP, DEFAULT_APP
from experiments.harness.command import emit, note, parser
from experiments.harness.network import Network, network
from experiments.harness.result import Row

COLUMNS = [
    *("row", "sites", "a round", "round s", "SuperLink MB", "SuperLink files", "server app MB"),
    *("SuperNode MB", "idle ms", "SuperLink ms", "server app ms", "late", "refused"),
]
FITTED = (
    *("round s", "idle SuperLink MB", "SuperLink MB", "SuperLink files", "server app MB"),
    *("idle share", "SuperLink s", "server app s", "start s"),
)
"""Columns through which a line is laid."""

AT_ONCE = 4
"""SuperNodes that are started together."""

REST, WATCHED = 25.0, 30.0
"""Seconds before and of a look at sites that wait; SuperNodes ask every three by then."""

QUORUM, GRACE = 0.9, 2.0

HELD_BACK = "experiments.many_sites:held_back"
HELD, LATE, HOLDING = "MANY_SITES_HELD", "MANY_SITES_LATE", "holding"
"""Environment variables with the folder and number of sites that are held back, and the file there
that holds them; each makes a file too."""


def main() -> None:
    """Measure at each number of sites, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--sites", type=int, nargs="+", default=[10, 25, 50, 100])
    arguments.add_argument("--a-round", type=int, default=20, help="sites that train in a round")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--late", type=int, default=2, help="sites that are held back in a round"
    )
    arguments.add_argument("--tls", action="store_true", help="TLS and SuperNode authentication")
    options = arguments.parse_args()
    numbers = sorted(options.sites)
    most = options.a_round - math.ceil(QUORUM * options.a_round)
    if options.late > most:
        arguments.error(f"--late {options.late}: a quorum of {options.a_round} spares {most}")
    rows = []
    with (
        held_sites(options.late),
        network() as joined,
        Fleet(joined, numbers[-1], tls=options.tls) as fleet,
    ):
        for number in numbers:
            about = {"row": "rounds", "sites": number, "tls": options.tls, "network": joined.kind}
            began = time.monotonic()
            fleet.grow(number)
            about["start s"] = round(time.monotonic() - began, 1)
            rows.append(about | waiting(fleet) | training(fleet, options.a_round, options.rounds))
            note(json.dumps(rows[-1]))
        if len(numbers) > 1:
            rows.append({"row": "a site", "tls": options.tls, **a_site(rows)})
        if options.late:
            rows.append(about | {"row": "late"} | late_sites(fleet, options.a_round))
    emit(rows, COLUMNS, as_json=options.json)


class Fleet:
    """A SuperLink and SuperNodes that stay from run to run.

    Parameters
    ----------
    joined
        Where they run.
    most
        Sites that there can be; each holds a share of the digits as large as that says.
    connections
        Connections of a SuperNode on a slow link; None leaves them at bract's.
    """

    def __init__(
        self, joined: Network, most: int, *, tls: bool, connections: int | None = None
    ) -> None:
        self.network, self.most, self.tls = joined, most, tls
        self._supernode = command_line("flower-supernode", forked=False)
        if connections is not None:
            changed = f"from bract.runtime import transfers; transfers.MOST = {connections}"
            code = f"{changed}; from bract.runtime import flower; flower.main()"
            self._supernode = [sys.executable, "-P", "-c", code, "flower-supernode"]
        self.sites = 0
        self._folder = Path(tempfile.mkdtemp(prefix="bract-sites-"))
        (self._folder / "logs").mkdir()
        self.processes = Processes(self._folder / "logs", threads=1, fork_server=True)
        self.socket = self.processes.folder / f"{SUPERLINK_PORT}.sock"

    def __enter__(self) -> "Fleet":
        try:
            self._start()
        except BaseException:
            self.processes.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def grow(self, number: int) -> None:
        """Start SuperNodes until there are ``number``, and wait until all are connected."""
        while self.sites < number:
            step = range(self.sites, min(number, self.sites + AT_ONCE))
            for site in step:
                self._start_supernode(site)
            for site in step:
                healthy = partial(self.processes.is_healthy, SUPERNODE_PORT + site)
                self.processes.wait_for(healthy, f"site {site}")
            self.sites = step.stop

    def named(self, name: str) -> psutil.Process:
        """Return the process that was started under a name."""
        (found,) = [p.handle.pid for p in self.processes._running if p.name == name]
        return psutil.Process(found)

    def _start(self) -> None:
        self.processes.begin()
        kit = self._folder / "kits" / "operator"
        options = ["--insecure"]
        if self.tls:
            names = [f"site-{number}" for number in range(self.most)]
            place = {"server": self.network.server, "port": 8443, "sites": names}
            config = build_config({"clients": self.most, "deployment": place})
            provision(config, self._folder / "kits", source=self._folder / "federation.yaml")
            options = [
                *("--enable-supernode-auth", "--ssl-certfile", str(kit / kits.GATEWAY)),
                *("--ssl-keyfile", str(kit / kits.GATEWAY_KEY)),
                *("--ssl-ca-certfile", str(kit / kits.CA)),
            ]
        listening = ["--host", sockets.HOST, "--port", str(SUPERLINK_PORT)]
        database = ["--database", str(self._folder / "superlink.db")]
        quiet = ["--disable-runtime-dependency-installation"]
        command = command_line("flower-superlink", forked=False)
        self.processes.start(
            "superlink",
            self.network.in_server([*command, *listening, *options, *database, *quiet]),
            {sockets.OPEN: f"{self.network.server}:{SUPERLINK_PORT}"},
        )
        self.processes.wait_for(lambda: sockets.is_healthy(self.socket), "the SuperLink")
        if self.tls:
            line = [
                sys.executable,
                "-P",
                "-m",
                "bract.cli.main",
                "site",
                "register",
                "--kit",
                str(kit),
            ]
            subprocess.run(
                [*line, "--sockets", str(self.socket.parent)], check=True, capture_output=True
            )

    def _start_supernode(self, site: int) -> None:
        node: dict[str, Any] = {"partition-id": site, "num-partitions": self.most}
        node["models"] = HELD_BACK
        options = ["--insecure"]
        if self.tls:
            kit = self._folder / "kits" / f"site-{site}"
            options = ["--root-certificates", str(kit / kits.CA)]
            options += ["--auth-supernode-private-key", str(kit / kits.NODE_KEY)]
        listening = ["--host", sockets.HOST, "--port", str(SUPERNODE_PORT + site)]
        place = ["--superlink", f"{self.network.server}:{SUPERLINK_PORT}"]
        command = [*self._supernode, *options, *place, *listening]
        self.processes.start(
            f"client-{site}",
            self.network.in_site(site, command),
            {
                APP: DEFAULT_APP,
                NODE_CONFIG: " ".join(f"{k}={json.dumps(v)}" for k, v in node.items()),
            },
        )


@dataclass
class Watch:
    """What a process held at the most, and the processor time that it took since the start."""

    process: psutil.Process
    megabytes: float = 0.0
    files: int = 0
    seconds: float = 0.0
    _began: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._began = self._time()

    def look(self) -> None:
        """Look at the process; one that is gone keeps what was seen of it."""
        with contextlib.suppress(psutil.Error, OSError):
            self.megabytes = max(self.megabytes, pss(self.process))
            self.files = max(self.files, self.process.num_fds())
            self.seconds = self._time() - self._began

    def _time(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def pss(process: psutil.Process) -> float:
    """Return a process's proportional share of memory, in megabytes."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return int(found) * 1024 / 1e6


def waiting(fleet: Fleet) -> Row:
    """Return what sites that wait hold, and what they cost the SuperLink."""
    time.sleep(REST)
    watch = Watch(fleet.named("superlink"))
    nodes = [Watch(fleet.named(f"client-{site}")) for site in range(fleet.sites)]
    began = time.monotonic()
    time.sleep(WATCHED)
    for one in (watch, *nodes):
        one.look()
    watched = time.monotonic() - began
    used, of_nodes = watch.seconds / watched, sum(n.seconds for n in nodes) / watched
    return {
        "idle SuperLink MB": round(watch.megabytes, 1),
        "idle share": round(used, 4),
        "idle ms": round(1000 * used / fleet.sites, 3),
        "idle SuperNode ms": round(1000 * of_nodes / fleet.sites, 3),
        "SuperNode MB": round(statistics.median(n.megabytes for n in nodes), 1),
        "SuperNode files": round(statistics.median(n.files for n in nodes)),
    }


def configured(sites: int, a_round: int, rounds: int, **strategy: Any) -> FederationConfig:
    """Return the federation that is trained."""
    # Half a site more, so that no rounding leaves one out.
    fraction = min(1.0, (a_round + 0.5) / sites)
    return build_config(
        {
            "name": "sites",
            "clients": sites,
            "rounds": rounds,
            "model": {"name": "lenet-strided", "activation": "relu"},
            "data": {"image_size": 16, "validation": 0.0},
            "training": {"local_steps": 1},
            "capture": {"enabled": False},
            "strategy": {"name": "fedavg", "fraction": fraction, **strategy},
        }
    )


@contextlib.contextmanager
def watched(fleet: Fleet, run: RunDirectory, found: dict[str, Any]) -> Iterator[None]:
    """Look at SuperLink and server app while the block runs; ``found`` gets what was seen.

    Processor time is counted from the end of the first round, in which every process imports.
    """
    ended = threading.Event()

    def look() -> None:
        watches: dict[str, Watch] = {}
        while not ended.wait(0.5):
            if not any(row.round == 1 for row in run.metrics()):
                continue
            if not watches:
                server = int(json.loads(run.server_lock_path.read_text())["pid"])
                watches["SuperLink"] = Watch(fleet.named("superlink"))
                watches["server app"] = Watch(psutil.Process(server))
            for watch in watches.values():
                watch.look()
        for name, watch in watches.items():
            found[f"{name} MB"] = round(watch.megabytes, 1)
            found[f"{name} files"] = watch.files
            found[f"{name} s"] = watch.seconds

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def training(fleet: Fleet, a_round: int, rounds: int) -> Row:
    """Return seconds, memory, files and processor time of rounds."""
    config = configured(fleet.sites, a_round, rounds)
    found: Row = {}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / config.name)
        with watched(fleet, run, found):
            run_federation(config, Path(folder), Launch(superlink=str(fleet.socket)))
        later = [row for row in run.metrics() if row.round >= 2]
    answers = sum(len(row.clients) for row in later)
    seconds = [row.seconds or 0.0 for row in later]
    for party in ("SuperLink", "server app"):
        found[f"{party} ms"] = round(1000 * found[f"{party} s"] / answers, 1)
        found[f"{party} s"] = round(found[f"{party} s"] / len(later), 3)
    return found | {
        "round s": round(statistics.median(seconds), 2),
        "fastest": round(min(seconds), 2),
        "slowest": round(max(seconds), 2),
        "rounds": len(later),
        "a round": round(answers / len(later)),
    }


def a_site(rows: Sequence[Row]) -> Row:
    """Return the slope of each of `FITTED` over the number of sites, and its value at none."""
    sites = [row["sites"] for row in rows]
    found: Row = {}
    for column in FITTED:
        slope, start = np.polyfit(sites, [row[column] for row in rows], 1)
        found[column] = round(float(slope), 6)
        found[f"{column} at none"] = round(float(start), 4)
    return found


@contextlib.contextmanager
def held_sites(number: int) -> Iterator[None]:
    """Tell ClientApps that are started in the block where they learn that they are to be late."""
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).parents[1])  # for the model of this file
        os.environ |= {HELD: folder, LATE: str(number), "PYTHONPATH": root}
        yield


def held_back() -> nn.Module:
    """Return LeNet; at a ClientApp that is to be late only once the round is over."""
    if Path(sys.argv[0]).name == "flwr-clientapp" and HELD in os.environ:
        folder = Path(os.environ[HELD])
        for number in range(int(os.environ[LATE])):
            with contextlib.suppress(OSError):
                if (folder / HOLDING).exists():
                    (folder / str(number)).touch(exist_ok=False)
                    until(lambda: not (folder / HOLDING).exists())
                    break
    return create_model("lenet-strided", classes=10, channels=1, image_size=16, activation="relu")


def late_sites(fleet: Fleet, a_round: int) -> Row:
    """Hold some sites' training back in the second round, let it go on; return what followed."""
    rounds = 5
    model = {"name": HELD_BACK}
    config = configured(
        fleet.sites, a_round, rounds, quorum=QUORUM, grace=GRACE, tolerate_failures=True
    )
    config = build_config(config.model_dump(exclude_unset=True) | {"model": model})
    holding = Path(os.environ[HELD]) / HOLDING
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / config.name)

        def rows() -> int:
            return len([row for row in run.metrics() if row.round])

        def hold() -> None:
            until(lambda: rows() >= 1)
            holding.touch()
            until(lambda: rows() >= 2)
            holding.unlink()

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        run_federation(config, Path(folder), Launch(superlink=str(fleet.socket)))
        thread.join(60)
        found = {row.round: row for row in run.metrics() if row.round}
    held = len(list(holding.parent.iterdir()))
    refused = {(one.client, one.round) for row in found.values() for one in row.late}
    return {
        "late": held,
        "quorum": QUORUM,
        "grace": GRACE,
        "round s": round(found[2].seconds or 0.0, 2),
        "answers": len(found[2].clients),
        "named": len({failure.client for failure in found[2].failures}),
        "refused": len([number for _, number in refused if number == 2]),
        "others late": len([number for _, number in refused if number != 2]),
        "answers by round": [len(found[number].clients) for number in sorted(found)],
        "seconds by round": [round(found[number].seconds or 0.0, 2) for number in sorted(found)],
    }


def until(what: Callable[[], bool], within: float = 600) -> None:
    """Wait; raise `TimeoutError` where it does not come true."""
    deadline = time.monotonic() + within
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not get as far in ten minutes")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
