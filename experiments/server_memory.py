"""Memory of a server's round over the number of its clients, with answers on disk and without.

    python -m experiments.server_memory [--clients 4 16 64] [--values 1000000] [--json]

A process of its own for each row plays the server of one round: answers arrive a few at a time, as
from a SuperLink, are read, checked and added by the strategy's own functions. ``plain`` is FedAvg
of float32 updates, ``encrypted`` the weighted sum of 2048-bit ciphertexts, ``whole`` two rounds of
the server app's FedAvg on a model in tensors of a million values, with captures of one client: from
the model that it holds at the start to the one that it writes at the end. Every answer brings bytes
of its own. ``MB`` is the most memory that no file backs (RssAnon, looked at every 5 ms)
beyond what the process had before the first answer; pages of a file that the kernel keeps are not
counted, since it drops them when memory is short.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from experiments.harness.command import emit, note, parser

COLUMNS = ["round", "answers", "clients", "values", "MB an answer", "MB", "models", "seconds"]
CLIP = 0.1
KINDS = ("plain", "encrypted", "whole")
ANSWERS = ("on disk", "in memory")
TENSOR = 1_000_000
VALUES = "BRACT_EXPERIMENT_VALUES"


def main() -> None:
    """Measure each case in a process of its own, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, nargs="+", default=[4, 16, 64])
    arguments.add_argument("--values", type=int, default=1_000_000)
    arguments.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    arguments.add_argument("--answers", nargs="+", default=ANSWERS, choices=ANSWERS)
    arguments.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        kind, answers, clients = options.one
        run = whole if kind == "whole" else one
        print(json.dumps(run(kind, answers == "on disk", int(clients), options.values)))
        return
    rows = []
    for kind in options.kinds:
        for answers in options.answers:
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


class Watch(threading.Thread):
    """Looks every 5 ms at this process's memory that no file backs; ``most`` is the most in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0.0, threading.Event()

    def run(self) -> None:
        """Look until ``done``."""
        while not self.done.wait(0.005):
            self.most = max(self.most, anonymous())


class Clients:
    """A grid whose clients answer every train message with an update of the model's size."""

    def __init__(self, count: int, update: Any) -> None:
        self.count, self.update = count, update
        self.sent: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        """Return the clients' numbers."""
        return list(range(1, self.count + 1))

    def get_nodes(self) -> list[Any]:
        """Return the clients."""
        return [SimpleNamespace(node_id=i, name=f"node-{i}") for i in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Give each message an id, as Flower does, and keep what is asked."""
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{len(self.sent)}"
            self.sent[message.metadata.message_id] = message
        return list(self.sent)

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        """Return an answer with bytes of its own for each message."""
        from flwr.app import Array

        from bract.protocol.records import write_reply

        found = []
        for number in ids:
            asked = self.sent.pop(number)
            reply = write_reply(
                client=f"client-{asked.metadata.dst_node_id}",
                version="0",
                update={},
                buffers={},
                num_examples=8,
                metrics={"loss": 1.0},
                declaration={"num_examples": 8},
                reply_to=asked,
            )
            # As from the SuperLink: bytes of its own, once.
            for name, array in self.update.items():
                data = bytes(bytearray(array.data))
                own = Array("float32", array.shape, array.stype, data)
                reply.content.array_records["update"][name] = own
            found.append(reply)
        return found


class Large(torch.nn.Module):
    """A linear classifier, and values in tensors of a million that have no part in it."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.last = torch.nn.Linear(1024, 10)
        self.rest = torch.nn.ParameterList(
            torch.full((TENSOR,), 0.5) for _ in range(values // TENSOR)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.last(images.flatten(1))
        return logits


def large() -> Large:
    """Return the model of the federation that is measured."""
    return Large(int(os.environ[VALUES]))


def whole(kind: str, on_disk: bool, clients: int, values: int) -> dict[str, Any]:
    """Run two rounds of the server's side and return their row."""
    from bract.config import build_config
    from bract.process import return_freed_memory
    from bract.protocol.arrays import to_arrays
    from bract.rundir import RunDirectory
    from bract.server.federation import Federation
    from bract.server.grid import PromptGrid
    from bract.server.loopback import LoopbackGrid
    from bract.server.spool import SpoolingGrid

    LoopbackGrid(cast(Any, None), [])  # tells Flower which task this is
    return_freed_memory()
    os.environ[VALUES] = str(values)
    config = build_config(
        {
            "clients": clients,
            "rounds": 2,
            "model": {"name": f"{Large.__module__}:large"},
            "capture": {"clients": ["client-1"]},
        }
    ).as_own_word()
    shapes = {name: tuple(value.shape) for name, value in large().named_parameters()}
    content = to_arrays({"w": torch.full((TENSOR,), 0.01)})["w"]
    least = to_arrays({n: torch.zeros(s) for n, s in shapes.items() if s != (TENSOR,)})
    update = {name: least.get(name, content) for name in shapes}
    size = 4 * values / 2**20
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        run.create(config)
        grid: Any = Clients(clients, update)
        if on_disk:
            grid = SpoolingGrid(grid, run.root)
        before, began = anonymous(), time.perf_counter()
        watch.start()
        Federation(config, run).train(PromptGrid(grid))
        watch.done.set()
    return {
        "round": kind,
        "answers": "on disk" if on_disk else "in memory",
        "clients": clients,
        "values": values,
        "MB an answer": round(size, 1),
        "MB": round(watch.most - before, 1),
        "models": round((watch.most - before) / size, 2),
        "seconds": round(time.perf_counter() - began, 1),
    }


def one(kind: str, on_disk: bool, clients: int, values: int) -> dict[str, Any]:
    """Play one round and return its row."""
    from bract.paillier import Layout, encrypt, generate_keypair
    from bract.protocol.arrays import from_arrays, to_arrays
    from bract.protocol.ciphertexts import EncryptedUpdate, combine_updates
    from bract.server.loopback import LoopbackGrid
    from bract.server.spool import SpoolingGrid
    from bract.updates.update import weighted_sum

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
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        grid: Any = Answering(contents, shapes)
        if on_disk:
            grid = SpoolingGrid(grid, Path(folder))
        (asked,) = Answering(contents, shapes).pull_messages(["0"])
        ids = list(grid.push_messages([asked] * clients))
        before, began = anonymous(), time.perf_counter()
        watch.start()
        answers = list(grid.pull_messages(ids))
        read = [from_arrays(m.content.array_records["update"]) for m in answers]
        if kind == "plain":
            weighted_sum(read, [1 / clients] * clients)
        else:
            updates = [EncryptedUpdate.from_tensors(tensors) for tensors in read]
            combine_updates(key.public, updates, [1] * clients)
        watch.done.set()
        seconds = time.perf_counter() - began
    return {
        "round": kind,
        "answers": "on disk" if on_disk else "in memory",
        "clients": clients,
        "values": values,
        "MB an answer": round(size, 1),
        "MB": round(watch.most - before, 1),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
