"""An encrypted round against a plain one: what each side computes in addition, time, accuracy.

    python -m experiments.rounds_encrypted [--cost] [--rounds 4] [--models lenet] [--accuracy 3]
        [--json]

``cost``: one client's added work in a fresh process, as Flower starts one for every message: read
the key, decrypt the last aggregate, apply it, encrypt an update (with a threshold also help to
decrypt). Processor time over all cores, which other programs on the machine do not disturb, and
wall time; the median over three processes. ``rounds``: seconds a round of LeNet and ResNet-20
through real processes, plain and encrypted in turn, without each run's first round; every client
takes four batches of eight a round. ``accuracy``: federations of LeNet on handwritten digits, plain
and encrypted, by seed. Without a choice all three run.
"""

import argparse
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bract.cli.launch.launcher import Launch
from bract.cli.run import run_federation
from bract.client.app import app
from bract.config import FederationConfig, build_config, dump_config
from bract.config.encryption import EncryptionConfig
from bract.models import create_model
from bract.paillier import combine, partial_decrypt
from bract.paillier.sharing import KeyShare
from bract.paillier.stripping import check_powers, strip_messages
from bract.protocol.ciphertexts import (
    EncryptedUpdate,
    apply_mean,
    combine_updates,
    decrypt_mean,
    encrypt_update,
    shaped,
)
from bract.protocol.keyfiles import read_key_file
from bract.rundir import RunDirectory
from bract.runtime.key_files import client_key, write_keys
from bract.server.encrypted import EncryptedFederation
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from bract.updates.update import Tensors, buffers_of, parameters_of
from experiments.harness.command import emit, note, parser

CLIENTS = 3
REPEATS = 3
SETUPS: dict[str, dict[str, Any]] = {
    "djn": {},
    "djn, degree 2": {"degree": 2},
    "djn, 3072 bits": {"key_bits": 3072},
    "standard": {"randomness": "standard"},
    "threshold 2 of 3": {"threshold": 2},
    "threshold 2 of 3, powers of the server": {"threshold": 2, "powers": "server"},
}
MODELS = ("lenet", "resnet20")
COSTS = [
    *(("lenet", setup) for setup in SETUPS),
    ("resnet20", "djn"),
    ("resnet20", "djn, degree 2"),
]


def main() -> None:
    """Measure, then print a table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--cost", action="store_true", help="measure the added computation")
    arguments.add_argument("--rounds", type=int, default=0, help="rounds of real processes")
    arguments.add_argument("--repeats", type=int, default=2, help="runs of each federation")
    arguments.add_argument("--accuracy", type=int, default=0, help="number of seeds")
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of rounds")
    arguments.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        print(json.dumps(client_step(Path(options.child[0]), *options.child[1:])))
        return
    if not (options.cost or options.rounds or options.accuracy):
        options.cost, options.rounds, options.accuracy = True, 4, 3
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("flwr").handlers.clear()
    rows: list[dict[str, Any]] = []
    if options.cost:
        rows += [cost(model, setup) for model, setup in COSTS]
    if options.rounds:
        for model in options.models:
            rows += rounds(model, options.rounds, options.repeats)
    if options.accuracy:
        rows += list(accuracies(options.accuracy))
    columns = (
        *("measured", "model", "setup", "client_cpu_seconds", "client_wall_seconds"),
        *("server_cpu_seconds", "megabytes", "seconds_per_round"),
        *("against_plain", "accuracy", "difference"),
    )
    emit(rows, columns, as_json=options.json)


def cost(model: str, setup: str) -> dict[str, Any]:
    """Return what one round adds at each side, for a model and a kind of key."""
    note(f"cost: {model}, {setup}")
    config = EncryptionConfig(scheme="paillier", **SETUPS[setup])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_keys(folder, config, CLIENTS)
        key = read_key_file(client_key(folder, 0, config.threshold))
        public = key.public
        update, buffers = changes(model)
        encryptor = public if isinstance(key, KeyShare) else key
        parts = [encrypt_update(encryptor, update, buffers, config)[0] for _ in range(CLIENTS)]
        started = time.process_time()
        total = combine_updates(public, parts, [10, 11, 10])
        stripped = total.powers
        for part, powers in stripped.items():
            check_powers(public, total.vectors[part], powers)
        if config.threshold is not None and not stripped:
            stripped = {p: strip_messages(public, v) for p, v in total.vectors.items()}
        server = time.process_time() - started
        torch.save((total.to_tensors(), stripped), folder / "aggregate.pt")
        steps = [child(folder, model, setup) for _ in range(REPEATS)]
    sent = [*(v.data for v in parts[0].vectors.values()), *parts[0].powers.values()]
    return {
        "measured": "cost",
        "model": model,
        "setup": setup,
        "parameters": sum(value.numel() for value in update.values()),
        "client_cpu_seconds": round(statistics.median(s["cpu"] for s in steps), 3),
        "client_wall_seconds": round(statistics.median(s["wall"] for s in steps), 3),
        "server_cpu_seconds": round(server, 3),
        "megabytes": round(sum(data.nbytes for data in sent) / 1e6, 3),
    }


def child(folder: Path, model: str, setup: str) -> dict[str, float]:
    """Run `client_step` in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--child", str(folder), model, setup]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def client_step(folder: Path, model: str, setup: str) -> dict[str, float]:
    """Do one client's added work of one round; return its processor and wall time."""
    config = EncryptionConfig(scheme="paillier", **SETUPS[setup])
    record, stripped = torch.load(folder / "aggregate.pt", weights_only=False)
    update, buffers = changes(model)
    state = state_of(model)
    others = []
    if config.threshold is not None:
        share = read_key_file(client_key(folder, 1, config.threshold))
        assert isinstance(share, KeyShare)
        vectors = EncryptedUpdate.from_tensors(record).vectors
        others = [partial_decrypt(share, vectors["parameters"], stripped["parameters"])]
    cpu, wall = time.process_time(), time.perf_counter()
    key = read_key_file(client_key(folder, 0, config.threshold))
    total = EncryptedUpdate.from_tensors(record)
    if isinstance(key, KeyShare):
        vector = total.vectors["parameters"]
        own = partial_decrypt(key, vector, stripped["parameters"])
        values = combine(key, vector, [own, *others])
        mean = {"parameters": shaped(values, total.shapes["parameters"])}
    else:
        mean = decrypt_mean(key, total)
    apply_mean(state, mean, 1.0)
    encrypt_update(key.public if isinstance(key, KeyShare) else key, update, buffers, config)
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def state_of(model: str) -> Tensors:
    """Return parameters and buffers of a model for 32x32 images of one channel."""
    built = create_model(model, classes=10, channels=1, image_size=32)
    return parameters_of(built) | buffers_of(built)


def changes(model: str) -> tuple[Tensors, Tensors]:
    """Return an update and buffer changes of the model's shapes, drawn at random."""
    built = create_model(model, classes=10, channels=1, image_size=32)
    generator = torch.Generator().manual_seed(0)
    update = {
        name: torch.randn(value.shape, generator=generator) * 0.01
        for name, value in parameters_of(built).items()
    }
    return update, buffers_of(built)


def rounds(model: str, count: int, repeats: int) -> list[dict[str, Any]]:
    """Return seconds a round of real processes, plain and encrypted."""
    seconds: dict[str, list[list[float]]] = {"plain": [], "paillier": []}
    added: list[float] = []
    for repeat in range(repeats):
        for setup, found in seconds.items():
            note(f"rounds: {model}, repeat {repeat + 1}, {setup}")
            config = federation(
                setup,
                rounds=count,
                seed=repeat,
                model={"name": model, "activation": "relu"},
                training={"lr": 0.1, "local_steps": 4},
                capture={"enabled": False},
            )
            with tempfile.TemporaryDirectory() as folder:
                rows = run_federation(config, Path(folder), Launch()).metrics()
            later = [row for row in rows if row.round >= 2]
            found.append([row.seconds or 0.0 for row in later])
            clients = [client for row in later for client in row.clients.values()]
            added += [
                c.encrypt_seconds + (c.decrypt_seconds or 0.0)
                for c in clients
                if c.encrypt_seconds is not None
            ]
    every = {setup: list(itertools.chain(*runs)) for setup, runs in seconds.items()}
    medians = {setup: [statistics.median(run) for run in runs] for setup, runs in seconds.items()}
    return [
        {
            "measured": "rounds",
            "model": model,
            "setup": setup,
            "strategy": "fedavg",
            "seconds_per_round": round(statistics.median(every[setup]), 2),
            "against_plain": round(
                statistics.median(
                    own / plain for own, plain in zip(medians[setup], medians["plain"], strict=True)
                ),
                3,
            ),
            "rounds": len(every[setup]),
            "client_wall_seconds": round(statistics.median(added), 3) if setup != "plain" else None,
        }
        for setup in seconds
    ]


def accuracies(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield test accuracies after ten rounds, plain and encrypted, by seed."""
    torch.set_num_threads(1)
    for seed in range(seeds):
        found = {}
        for setup in ("plain", "paillier"):
            note(f"accuracy: seed {seed}, {setup}")
            config = federation(setup, rounds=10, seed=seed, capture={"enabled": False})
            found[setup] = accuracy(config)
        for setup, value in found.items():
            yield {
                "measured": "accuracy",
                "model": "lenet",
                "setup": setup,
                "seed": seed,
                "rounds": 10,
                "accuracy": round(value, 4),
                "difference": round(value - found["plain"], 4),
            }


def accuracy(config: FederationConfig) -> float:
    """Return the final model's accuracy on the test split."""
    encryption = config.encryption
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if encryption.enabled:
            write_keys(folder / "keys", encryption, CLIENTS)
        nodes: list[dict[str, Any]] = [
            {
                "partition-id": client,
                "public-test": True,
                **(
                    {"paillier-key": str(client_key(folder / "keys", client, None))}
                    if encryption.enabled
                    else {}
                ),
            }
            for client in range(CLIENTS)
        ]
        run = RunDirectory(folder / "run")
        run.create(config)
        kind = EncryptedFederation if encryption.enabled else Federation
        kind(config, run).train(LoopbackGrid(app, nodes, {"federation": dump_config(config)}))
        judged = run.metrics()[-1].evaluation
        assert judged is not None and judged.accuracy is not None
        return judged.accuracy


def federation(setup: str, **changed: Any) -> FederationConfig:
    """Return the federation that is measured: LeNet on digits."""
    return build_config(
        {
            "name": "rounds-encrypted",
            "clients": CLIENTS,
            "model": {"name": "lenet", "activation": "relu"},
            "training": {"lr": 0.1},
            "encryption": "paillier" if setup == "paillier" else "none",
            **changed,
        }
    )


if __name__ == "__main__":
    main()
