"""A round over a slow link that loses packets, and over one that is cut.

    python -m experiments.links [--model resnet18] [--megabits 20] [--loss 0.05]
        [--milliseconds 10] [--control reno bbr] [--connections 2 8] [--dtype float32]
        [--cut 60] [--json]

One site trains one batch of `--model` behind a link (`experiments.harness.link`, a process of this
experiment that forwards packets between network namespaces: 5 % loss each way, a delay of 10 ms
each way) of `--megabits` a second; SuperLink and SuperNode run as kits run them, with TLS. Each
`--control` is a congestion control of TCP that the kernel uses at both ends, with each number of
`--connections` that the SuperNode moves parts of a message on (2 are Flower's). ``bytes s`` is the
time that the model down and the update up take at the link's rate; ``transfer s`` is the round's
time without what the same round takes over namespaces that no link slows. The first round, in
which processes import, is left out. Each `--cut` is a break of so many seconds, which begins when a
third of an update's time has gone; ``sent`` is what the site's interface sent in that round, over
the update's bytes. ``--tcp`` measures the link alone instead: megabits a second of bytes that plain
connections send from site to server, which need no federation.
"""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bract.cli.launch.launcher import ENDED, Launch
from bract.cli.run import run_federation
from bract.config import build_config
from bract.errors import RunFailedError
from bract.rundir import RunDirectory
from bract.runtime.transfers import MOST
from experiments.harness.command import emit, note, parser
from experiments.harness.link import SERVER, Link, link
from experiments.harness.network import NAMESPACES, Network, network
from experiments.harness.result import Row
from experiments.many_sites import Fleet, until

COLUMNS = [
    *(
        "row",
        "control",
        "connections",
        "model",
        "dtype",
        "cut s",
        "bytes s",
        "round s",
        "transfer s",
        "ratio",
    ),
    *("sent", "failure"),
]
TCP_COLUMNS = ["megabits", "loss", "milliseconds", "control", "connections", "rate", "part"]

SECONDS = 20
"""How long plain connections send."""

RECEIVER = """
import socket, sys, threading
listening = socket.create_server((sys.argv[1], 9000), backlog=64)
def take(connection):
    count = 0
    while data := connection.recv(1 << 16):
        count += len(data)
        connection.sendall(count.to_bytes(8, "big"))
while True:
    threading.Thread(target=take, args=(listening.accept()[0],), daemon=True).start()
"""
"""Takes what comes, and tells the sender after each piece how much that was."""

SENDER = """
import socket, sys, threading, time
server, control, connections, seconds = sys.argv[1:]
end, counts = time.monotonic() + float(seconds), [0] * int(connections)
def send(place):
    made = socket.socket()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    made.connect((server, 9000))
    def hear():
        while number := made.recv(8, socket.MSG_WAITALL):
            if time.monotonic() < end:
                counts[place] = int.from_bytes(number, "big")
    threading.Thread(target=hear, daemon=True).start()
    while time.monotonic() < end:
        made.sendall(bytes(1 << 14))
threads = [threading.Thread(target=send, args=(n,), daemon=True) for n in range(len(counts))]
for thread in threads:
    thread.start()
time.sleep(float(seconds) + 0.5)
print(sum(counts))
"""


def main() -> None:
    """Measure, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="resnet18")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--megabits", type=float, default=20.0)
    arguments.add_argument("--loss", type=float, default=0.05)
    arguments.add_argument("--milliseconds", type=float, default=10.0)
    arguments.add_argument("--control", nargs="*", default=["reno", "bbr"])
    arguments.add_argument("--connections", type=int, nargs="*", default=[2, MOST])
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--tcp", action="store_true", help="measure the link alone")
    arguments.add_argument("--cut", type=float, nargs="*", default=[])
    options = arguments.parse_args()
    if options.tcp:
        emit(alone(options), ["row", *TCP_COLUMNS], as_json=options.json)
        return
    about = {"model": options.model, "dtype": options.dtype}
    with network() as joined:
        if joined.kind != NAMESPACES:
            raise SystemExit("links: needs root and iproute2, to make network namespaces")
        plain = one_run(joined, options)
    rows: list[Row] = [about | {"row": "no link", "round s": plain["round s"]}]
    runs = [(c, n, 0.0) for c in options.control for n in options.connections]
    runs += [(options.control[-1], options.connections[-1], seconds) for seconds in options.cut]
    for control, connections, seconds in runs:
        with slowed(options, control) as (joined, between):
            found = one_run(joined, options, connections, between, seconds)
        row = about | {"row": "cut" if seconds else "link", "control": control}
        row |= {"connections": connections, "cut s": seconds}
        rows.append(row | found | against(found, plain))
        note(json.dumps(rows[-1]))
    emit(rows, COLUMNS, as_json=options.json)


def alone(options: Any) -> list[Row]:
    """Return the rate of plain connections over the link, each number for `SECONDS`."""
    rows = []
    for control, connections in itertools.product(options.control, options.connections):
        with slowed(options, "") as (joined, _):
            code = [sys.executable, "-P", "-c"]
            server = subprocess.Popen(joined.in_server([*code, RECEIVER, SERVER]))
            try:
                time.sleep(1.0)
                words = [SERVER, control, str(connections), str(SECONDS)]
                line = joined.in_site(0, [*code, SENDER, *words])
                sent = int(subprocess.run(line, check=True, capture_output=True).stdout)
            finally:
                server.kill()
                server.wait()
        rate = 8 * sent / SECONDS / 1e6
        rows.append(
            {"row": "tcp", "control": control, "connections": connections, "loss": options.loss}
            | {"megabits": options.megabits, "milliseconds": options.milliseconds}
            | {"rate": round(rate, 2), "part": round(rate / options.megabits, 3)}
        )
        note(str(rows[-1]))
    return rows


def against(found: Row, plain: Row) -> Row:
    """Return what the link added to a round, and how often the bytes' own time that is."""
    if found["round s"] is None:
        return {}
    transfer = found["round s"] - plain["round s"]
    return {"transfer s": round(transfer, 1), "ratio": round(transfer / found["bytes s"], 3)}


@contextlib.contextmanager
def slowed(options: Any, control: str) -> Iterator[tuple[Network, Link]]:
    """Join a server's and a site's namespace by the link alone; "" leaves the control."""
    own = f"bract{uuid.uuid4().hex[:6]}"
    names = (f"{own}-server", f"{own}-site")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            if control:
                setting = f"echo {control} > /proc/sys/net/ipv4/tcp_congestion_control"
                subprocess.run(["ip", "netns", "exec", name, "sh", "-c", setting], check=True)
        settings = {
            "megabits": options.megabits,
            "loss": options.loss,
            "milliseconds": options.milliseconds,
        }
        with link(*names, **settings) as between:
            yield Linked(NAMESPACES, SERVER, names[0], [*names]), between
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


class Linked(Network):
    """Two namespaces that exist."""

    def in_site(self, _number: int, command: list[str]) -> list[str]:
        """Return a command line that runs at the one site."""
        return ["ip", "netns", "exec", self._made[1], *command]


def one_run(
    joined: Network,
    options: Any,
    connections: int | None = None,
    between: Link | None = None,
    cut: float = 0.0,
) -> Row:
    """Train; return the seconds of a round, and what the site sent in it.

    ``between`` is cut for ``cut`` seconds in the second round.
    """
    config = build_config(
        {
            "name": "links",
            "clients": 1,
            "rounds": options.rounds,
            "model": {"name": options.model, "activation": "relu"},
            "data": {"image_size": 32, "validation": 0.0},
            "training": {
                "lr": 0.001,
                "local_steps": 1,
                "batch_size": 2,
                "update_dtype": options.dtype,
            },
            "capture": {"enabled": False},
            "strategy": {"name": "fedavg", "timeout": 3000},
        }
    )
    made = Fleet(joined, 1, tls=True, connections=connections)
    with made as fleet, tempfile.TemporaryDirectory() as folder:
        fleet.grow(1)
        run = RunDirectory(Path(folder) / config.name)
        watching = Watching(run, joined, between, cut)
        watching.start()
        failure = None
        try:
            run_federation(config, Path(folder), Launch(superlink=str(fleet.socket)))
        except RunFailedError as error:
            failure = str(error)
        watching.join()
        rows = [row for row in run.metrics() if row.round >= 2]
        size = (run.models / "last.safetensors").stat().st_size
    up = size if options.dtype == "float32" else size / 2
    seconds = [row.seconds or 0.0 for row in rows]
    return {
        "MB": round(size / 1e6, 1),
        "bytes s": round(8 * (size + up) / options.megabits / 1e6, 1),
        "round s": round(statistics.median(seconds), 2) if seconds else None,
        "sent": round(watching.sent / up, 3),
        "failure": failure,
    }


class Watching(threading.Thread):
    """Counts what the site sends in the second round, and cuts the link in the midst of it.

    Attributes
    ----------
    sent
        Bytes from the end of the first round to that of the second.
    """

    def __init__(
        self, run: RunDirectory, joined: Network, between: Link | None, cut: float
    ) -> None:
        super().__init__(daemon=True)
        self._run, self._joined, self._between, self._cut = run, joined, between, cut
        self.sent = 0

    def run(self) -> None:
        """Watch until the run has ended."""
        until(lambda: self._rounds() >= 1, within=3600)
        before = self._bytes()
        model = self._run.models / "last.safetensors"
        if self._between is not None and self._cut:
            third = model.stat().st_size / 3
            until(lambda: self._bytes() - before > third, within=3600)
            self._between.cut()
            note(f"cut for {self._cut:g} s")
            time.sleep(self._cut)
            self._between.restore()
        until(
            lambda: self._rounds() >= 2 or self._run.state().status in ENDED,
            within=3600,
        )
        self.sent = self._bytes() - before

    def _rounds(self) -> int:
        return max((row.round for row in self._run.metrics()), default=0)

    def _bytes(self) -> int:
        command = self._joined.in_site(0, ["cat", "/proc/net/dev"])
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines = [line.split() for line in text.splitlines() if ":" in line]
        return sum(int(words[9]) for words in lines if words[0] not in ("lo:",))


if __name__ == "__main__":
    main()
