"""What a defense costs in accuracy: digits, 3 clients, the real client and server in one process.

FedKL ends with a model for each client: its accuracy is the mean over the clients' own keys;
``random_key`` is what a server gets that draws key and lock layers itself (mean of 5 draws).
"""

import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from results_io import emit, interval, note, parser
from safetensors.torch import load_file

import bract.client.app as client_app
from bract.client.defending import defenses_of
from bract.client.defenses import DefenseState
from bract.config import FederationConfig, build_config, dump_config
from bract.data import data_spec, test_data
from bract.evaluation import evaluate
from bract.models import create_model, key_locks, with_random_key
from bract.rundir import RunDirectory
from bract.server.app import Federation
from bract.server.loopback import LoopbackGrid

CHAINS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "adadefense": [{"name": "adadefense"}],
    "guardian": [{"name": "guardian"}],
    "fedkl": [{"name": "fedkl"}],
    "pruning": [{"name": "pruning"}],
    "noise": [{"name": "noise", "std": 1e-3}],
    "precode": [{"name": "precode"}],
}

COLUMNS = ("defense", "model", "rounds", "accuracy", "accuracy_ci95", "points", "random_key")


def train(config: FederationConfig, folder: Path) -> tuple[float, float | None]:
    """Run a federation; return the final test accuracy, and FedKL's under random keys."""
    run = RunDirectory(folder / "run")
    run.create(config)
    nodes = [
        {"partition-id": i, "private-seed": config.seed * 100 + i, "state-dir": str(folder)}
        for i in range(config.clients)
    ]
    grid = LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
    Federation(config, run).train(grid)
    spec = data_spec(config.data)
    test = test_data(config.data)
    chain = defenses_of(config)
    model = chain.prepare_model(
        create_model(
            config.model.name,
            classes=spec.classes,
            channels=spec.image_shape[0],
            image_size=spec.image_shape[1],
            activation=config.model.activation,
        )
    )
    model.load_state_dict(load_file(run.models / "final.safetensors"))
    if not key_locks(model):
        return evaluate(model, *test, spec=spec)[1], None
    own, strange = [], []
    for i in range(config.clients):
        store = DefenseState(RecordDict(), directory=folder, key=f"{config.name}-client-{i}")
        chain.attach(model, store.load())
        own.append(evaluate(model, *test, spec=spec)[1])
        for draw in range(5):
            stranger = with_random_key(model, torch.Generator().manual_seed(draw))
            strange.append(evaluate(stranger, *test, spec=spec)[1])
    return statistics.fmean(own), statistics.fmean(strange)


def main() -> None:
    """Train every chain from several seeds."""
    options = parser(__doc__ or "", "defended_accuracy", picture=False)
    options.add_argument("--model", default="lenet-bn")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--lr", type=float, default=0.05)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--defenses", nargs="*", default=list(CHAINS))
    arguments = options.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for name in arguments.defenses:
        found = []
        for seed in range(arguments.seeds):
            note(f"{name}, seed {seed}")
            config = build_config(
                {
                    "seed": seed,
                    "rounds": arguments.rounds,
                    "model": {"name": arguments.model, "activation": "relu"},
                    "training": {"lr": arguments.lr},
                    "capture": {"enabled": False},
                    "defenses": CHAINS[name],
                }
            )
            with tempfile.TemporaryDirectory() as folder:
                found.append(train(config, Path(folder)))
        accuracy, spread = interval([own for own, _ in found])
        strange = [value for _, value in found if value is not None]
        rows.append(
            {
                "defense": name,
                "model": arguments.model,
                "rounds": arguments.rounds,
                "seeds": arguments.seeds,
                "lr": arguments.lr,
                "accuracy": accuracy,
                "accuracy_ci95": spread,
                "points": 100 * (accuracy - rows[0]["accuracy"]) if rows else 0.0,
                "random_key": statistics.fmean(strange) if strange else None,
            }
        )
    emit(rows, COLUMNS, as_json=arguments.json)


if __name__ == "__main__":
    main()
