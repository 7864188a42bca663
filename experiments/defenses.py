"""What a defense adds to a client's step: protected over plain, measured in turn in one process.

A plain step is what a client does for one train message: it loads the received parameters and
trains locally. ``fedsgd`` is the papers' setting, the gradient of one batch of 32; ``fedavg`` is
the default federation's, one epoch of 432 examples in batches of 8. A protected step also attaches
secrets, defends the update, and loads and stores the private state. On a CPU the times are those of
one thread's own work, so that other programs on the machine count less.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict

from bract.client.defending import Defending
from bract.client.defenses import DefenseChain, DefenseState, ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.updates.update import buffers_of, parameters_of
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.uploads import network_for

DEFENSES: list[dict[str, Any]] = [
    {"name": "adadefense"},
    {"name": "guardian"},
    {"name": "fedkl"},
    {"name": "pruning"},
    {"name": "noise", "std": 1e-3},
    {"name": "precode"},
    {"name": "soteria"},
]

SETTINGS = {
    "fedsgd": (TrainingConfig(algorithm="fedsgd", batch_size=32, lr=0.05), 32),
    "fedavg": (TrainingConfig(batch_size=8, lr=0.05), 432),
}

COLUMNS = ("defense", "model", "algorithm", "steps", "plain_ms", "protected_ms", "ratio")


@dataclass
class Turn:
    """One client's step, with or without defenses."""

    model: str
    channels: int
    training: TrainingConfig
    examples: int
    chain: DefenseChain
    device: torch.device

    def __post_init__(self) -> None:
        self.record = RecordDict()
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(self.examples, self.channels, 32, 32, generator=generator)
        self.labels = torch.randint(10, (self.examples,), generator=generator)
        self.spec = DataSpec(
            (self.channels, 32, 32), 10, (0.5,) * self.channels, (0.25,) * self.channels
        )
        self.network = network_for(self.spec, self.model, 0, activation="relu", chain=self.chain)
        self.received = parameters_of(self.network) | buffers_of(self.network)

    def __call__(self) -> int:
        """Take the step and return the number of local steps."""
        self.network.load_state_dict(self.received)
        store = DefenseState(self.record, directory=None, key="benchmark")
        state = store.load()
        defending = Defending(self.chain, store, state, ProtectContext())
        defending.attach(self.network)
        result = train_locally(
            self.network,
            self.images,
            self.labels,
            config=self.training,
            spec=self.spec,
            seed=0,
            device=self.device,
        )
        batch = result.used[: self.training.batch_size]
        defending.protect(
            result.update,
            model=self.network,
            images=self.spec.normalise(self.images[batch]).to(self.device),
            labels=self.labels[batch].to(self.device),
        )
        return result.steps


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return how long ``action`` took."""
    if device.type == "cpu":
        started = time.process_time()
        action()
        return time.process_time() - started
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    action()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def compare(plain: Turn, protected: Turn, budget: float) -> tuple[float, float, list[float]]:
    """Take both in turn for about ``budget`` seconds.

    Returns
    -------
    tuple
        Median seconds of both, and the quartiles of protected over plain.
    """
    times: list[tuple[float, float]] = []
    plain(), protected()
    started = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < budget and len(times) < 400):
        times.append((seconds(plain, plain.device), seconds(protected, plain.device)))
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return first, second, statistics.quantiles([b / a for a, b in times])


def main() -> None:
    """Measure every defense on every model."""
    options = parser(__doc__, "device")
    options.add_argument("--models", nargs="*", default=["lenet-bn", "resnet20"])
    options.add_argument("--defenses", nargs="*", default=[d["name"] for d in DEFENSES])
    options.add_argument("--algorithms", nargs="*", default=list(SETTINGS))
    options.add_argument("--seconds", type=float, default=6.0, help="time for each row")
    arguments = parse(options)
    device = torch.device(arguments.device)
    rows = []
    for model in arguments.models:
        channels = 1 if model.startswith("lenet") else 3
        for algorithm in arguments.algorithms:
            for entry in DEFENSES:
                if entry["name"] not in arguments.defenses:
                    continue
                note(f"{model} {algorithm} {entry['name']}")
                plain, protected = (
                    Turn(model, channels, *SETTINGS[algorithm], build_defenses(entries), device)
                    for entries in ([], [entry])
                )
                before, after, quartiles = compare(plain, protected, arguments.seconds)
                rows.append(
                    {
                        "defense": entry["name"],
                        "model": model,
                        "algorithm": algorithm,
                        "steps": plain(),
                        "batch": SETTINGS[algorithm][0].batch_size,
                        "plain_ms": before * 1e3,
                        "protected_ms": after * 1e3,
                        "ratio": quartiles[1],
                        "ratio_quartiles": [quartiles[0], quartiles[2]],
                    }
                )
    emit(rows, COLUMNS, as_json=arguments.json)


if __name__ == "__main__":
    main()
