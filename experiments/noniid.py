"""FedAvg, FedProx and FedBoosting on digits whose classes are unevenly spread over the clients.

    python -m experiments.noniid [--seeds 5] [--rounds 20] [--json]

Five clients, Dirichlet(0.1) class shares or two label shards a client, batches of 8, three local
epochs, SGD 0.1. Each seed draws another partition and another start; all strategies share them.
"""

from pathlib import Path
from typing import Any

import numpy as np

from bract.config import build_config
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.digits import DigitsClient, Judge, start_of
from experiments.harness.pictures import canvas, save
from experiments.harness.scores import interval
from experiments.harness.simulation import STRATEGIES, simulate

PARTITIONS = {
    "dirichlet(0.1)": {"kind": "dirichlet", "alpha": 0.1, "min_examples": 20},
    "shards(2)": {"kind": "shards", "shards_per_client": 2},
}
COMPARED = (
    "fedavg",
    "fedavg-uniform",
    "fedprox",
    "fedboosting",
    "fedboosting-proportional",
    "fedboosting-loss",
)
CLIENTS = 5


def main() -> None:
    """Run every partition, seed and strategy; print the table and draw accuracy by round."""
    arguments = parser(__doc__, picture="noniid-cpu")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--lr", type=float, default=0.1)
    arguments.add_argument("--batch-size", type=int, default=8)
    arguments.add_argument("--local-epochs", type=int, default=3)
    options = parse(arguments)
    curves: dict[str, dict[str, list[list[float]]]] = {p: {} for p in PARTITIONS}
    for partition, section in PARTITIONS.items():
        for seed in range(options.seeds):
            config = build_config(
                {
                    "seed": seed,
                    "clients": CLIENTS,
                    "data": {"image_size": 16, "partition": section},
                    "model": {"name": "lenet-strided", "activation": "relu"},
                    "training": {
                        "batch_size": options.batch_size,
                        "local_epochs": options.local_epochs,
                        "lr": options.lr,
                    },
                }
            )
            clients = [DigitsClient(config, i) for i in range(CLIENTS)]
            judge, start = Judge(config), start_of(config)
            for name in COMPARED:
                strategy = STRATEGIES[name](CLIENTS)
                rows = simulate(strategy, clients, start, options.rounds, judge)
                curve = [row["accuracy"] for row in rows]
                curve += [curve[-1]] * (options.rounds - len(curve))
                curves[partition].setdefault(name, []).append(curve)
                note(f"{partition} seed {seed} {name}: {curve[-1]:.4f}")
    draw(curves, options.picture)
    rows = [
        summary(p, name, runs, curves[p]["fedavg"])
        for p in curves
        for name, runs in curves[p].items()
    ]
    emit(
        rows,
        (
            "partition",
            "strategy",
            "accuracy",
            "interval",
            "mean_over_rounds",
            "against_fedavg",
            "against_fedavg_interval",
        ),
        as_json=options.json,
    )


def summary(
    partition: str, name: str, runs: list[list[float]], baseline: list[list[float]]
) -> dict[str, Any]:
    """Return one row: last-round accuracy, and the seed-by-seed difference to FedAvg."""
    mean, half = interval([curve[-1] for curve in runs])
    pairs = zip(runs, baseline, strict=True)
    ahead, ahead_half = interval([float(np.mean(a)) - float(np.mean(b)) for a, b in pairs])
    return {
        "partition": partition,
        "strategy": name,
        "accuracy": mean,
        "interval": half,
        "mean_over_rounds": float(np.mean(runs)),
        "against_fedavg": ahead,
        "against_fedavg_interval": ahead_half,
        "curves": runs,
    }


def draw(curves: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Draw test accuracy by round: mean and 95 % interval over the seeds."""
    figure, axes = canvas(1, len(curves), 13, 4.5, sharey=True)
    for axis, (partition, found) in zip(axes, curves.items(), strict=True):
        for name, runs in found.items():
            points = [interval(column) for column in zip(*runs, strict=True)]
            means = np.array([mean for mean, _ in points])
            halves = np.array([half or 0.0 for _, half in points])
            rounds = np.arange(1, len(means) + 1)
            axis.plot(rounds, means, label=name)
            axis.fill_between(rounds, means - halves, means + halves, alpha=0.12)
        axis.set(title=partition, xlabel="round", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    save(figure, path, dpi=90)


if __name__ == "__main__":
    main()
