"""Memory of a server's round over the number of its clients, with answers on disk and without.

    python -m experiments.server_memory [--clients 4 16 64] [--values 1000000] [--json]

A process of its own for each row plays the server of one round: answers arrive a few at a time, as
from a SuperLink, are read, checked and added by the strategy's own functions. ``plain`` is FedAvg
of float32 updates, ``encrypted`` the weighted sum of 2048-bit ciphertexts; every answer brings
bytes of its own. ``MB`` is the most memory that no file backs (RssAnon, looked at every 5 ms)
beyond what the process had before the first answer; pages of a file that the kernel keeps are not
counted, since it drops them when memory is short.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiments.harness.command import emit, note, parser

COLUMNS = ["round", "answers", "clients", "values", "MB an answer", "MB", "seconds"]
CLIP = 0.1
KINDS = ("plain", "encrypted")


def main() -> None:
    """Measure each case in a process of its own, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, nargs="+", default=[4, 16, 64])
    arguments.add_argument("--values", type=int, default=1_000_000)
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        kind, answers, clients = options.one
        print(json.dumps(one(kind, answers == "on disk", int(clients), options.values)))
        return
    rows = []
    for kind in KINDS:
        for answers in ("on disk", "in memory"):
            for clients in options.clients:
                command = [sys.executable, "-m", __spec__.name, "--values", str(options.values)]
                command += ["--one", kind, answers, str(clients)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                note(f"{kind}, {answers}, {clients} clients: {rows[-1]['MB']} MB")
    emit(rows, COLUMNS, as_json=options.json)


def anonymous() -> float:
    """Return this process's memory that no file backs, in megabytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(t.split()[1]) / 1024 for t in status.splitlines() if t.startswith("RssAnon"))


class Answering:
    """A grid that makes a client's answer when it is asked for it."""

    def __init__(self, records: dict[str, bytes], shape: dict[str, Any]) -> None:
        self.records, self.shape = records, shape

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Return a number for each message."""
        return [str(i) for i, _ in enumerate(messages)]

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        """Return an answer with bytes of its own for each number."""
        from flwr.app import Array, ArrayRecord, Message, RecordDict

        found = []
        for _ in ids:
            arrays = {
                name: Array("uint8", self.shape[name], "numpy.ndarray", bytes(bytearray(data)))
                for name, data in self.records.items()
            }
            found.append(Message(RecordDict({"update": ArrayRecord(arrays)}), 1, "train"))
        return found


def one(kind: str, on_disk: bool, clients: int, values: int) -> dict[str, Any]:
    """Play one round and return its row."""
    import torch

    from bract.paillier import Layout, encrypt, generate_keypair
    from bract.protocol.arrays import from_arrays, to_arrays
    from bract.protocol.ciphertexts import EncryptedUpdate, combine_updates
    from bract.protocol.update import weighted_sum
    from bract.server.loopback import LoopbackGrid
    from bract.server.spool import SpoolingGrid

    LoopbackGrid(cast(Any, None), [])  # tells Flower which task this is
    generator = np.random.default_rng(0)
    update = generator.standard_normal(values, dtype=np.float32) * np.float32(0.03)
    key = generate_keypair(2048)
    if kind == "plain":
        tensors = {"w": torch.from_numpy(update)}
    else:
        vector, _ = encrypt(key, update, Layout(values, CLIP, 16, 1023, 2048))
        held = EncryptedUpdate({"parameters": vector}, {"parameters": (("w", (values,)),)})
        tensors = held.to_tensors()
        del vector, held
    record = to_arrays(tensors)
    size = sum(len(array.data) for array in record.values()) / 2**20
    contents = {name: array.data for name, array in record.items()}
    shapes = {name: array.shape for name, array in record.items()}
    del tensors, record, update
    most, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], anonymous())

    with tempfile.TemporaryDirectory() as folder:
        grid: Any = Answering(contents, shapes)
        if on_disk:
            grid = SpoolingGrid(grid, Path(folder))
        (asked,) = Answering(contents, shapes).pull_messages(["0"])
        ids = list(grid.push_messages([asked] * clients))
        before, began = anonymous(), time.perf_counter()
        threading.Thread(target=watch, daemon=True).start()
        answers = list(grid.pull_messages(ids))
        read = [from_arrays(m.content.array_records["update"]) for m in answers]
        if kind == "plain":
            weighted_sum(read, [1 / clients] * clients)
        else:
            updates = [EncryptedUpdate.from_tensors(tensors) for tensors in read]
            combine_updates(key.public, updates, [1] * clients)
        done.set()
        seconds = time.perf_counter() - began
    return {
        "round": kind,
        "answers": "on disk" if on_disk else "in memory",
        "clients": clients,
        "values": values,
        "MB an answer": round(size, 1),
        "MB": round(most[0] - before, 1),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
