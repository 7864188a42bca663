"""A client whose labels are permuted: its weight per round, and what it costs the global model.

    python -m experiments.poisoned [--seeds 5] [--rounds 10] [--poisoned 1] [--json]

Five clients share the digits at random; the first ``--poisoned`` of them hold labels that are
all wrong (k becomes k+1). The same seeds run without poison for comparison.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bract.config import build_config
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.digits import DigitsClient, Judge, start_of
from experiments.harness.pictures import canvas, save
from experiments.harness.scores import interval
from experiments.harness.simulation import STRATEGIES, simulate

COMPARED = ("fedavg-uniform", "fedboosting", "fedboosting-proportional", "fedboosting-loss")
CLIENTS = 5


def main() -> None:
    """Run every seed and strategy with and without poison, print the table, draw by round."""
    arguments = parser(__doc__, picture="poisoned-cpu")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--poisoned", type=int, default=1, help="clients with wrong labels")
    options = parse(arguments)
    wrong = torch.roll(torch.arange(10), -1)
    runs: dict[tuple[str, int], list[list[dict[str, Any]]]] = {}
    for seed in range(options.seeds):
        config = build_config(
            {
                "seed": seed,
                "clients": CLIENTS,
                "data": {"image_size": 16},
                "model": {"name": "lenet-strided", "activation": "relu"},
                "training": {"batch_size": 8, "local_epochs": 1, "lr": 0.1},
            }
        )
        judge, start = Judge(config), start_of(config)
        for poisoned in (0, options.poisoned):
            clients = [
                DigitsClient(config, i, wrong if i < poisoned else None) for i in range(CLIENTS)
            ]
            for name in COMPARED:
                rows = simulate(STRATEGIES[name](CLIENTS), clients, start, options.rounds, judge)
                runs.setdefault((name, poisoned), []).append(rows)
                weight = rows[-1]["weights"][0]
                note(
                    f"seed {seed} {name}, {poisoned} poisoned: {rows[-1]['accuracy']:.4f}, "
                    f"weight of the first client {weight:.3f}"
                )
    table = [summary(*key, found) for key, found in runs.items()]
    draw(runs, options.poisoned, options.picture)
    emit(
        table,
        (
            "strategy",
            "poisoned",
            "accuracy",
            "interval",
            "weight",
            "largest_weight_from_round_2",
            "uniform",
        ),
        as_json=options.json,
    )


def summary(name: str, poisoned: int, runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return one row; ``weight`` is the first client's, averaged over rounds from the second."""
    mean, half = interval([rows[-1]["accuracy"] for rows in runs])
    weights = np.array([[row["weights"][0] for row in rows] for rows in runs])
    return {
        "strategy": name,
        "poisoned": poisoned,
        "accuracy": mean,
        "interval": half,
        "weight": float(weights[:, 1:].mean()),
        "largest_weight_from_round_2": float(weights[:, 1:].max()),
        "uniform": 1.0 / CLIENTS,
        "weights_by_round": weights.mean(axis=0).tolist(),
        "accuracy_by_round": [
            float(np.mean([rows[r]["accuracy"] for rows in runs])) for r in range(len(runs[0]))
        ],
    }


def draw(
    runs: dict[tuple[str, int], list[list[dict[str, Any]]]], poisoned: int, path: Path
) -> None:
    """Draw the poisoned client's weight and the test accuracy by round."""
    figure, (left, right) = canvas(1, 2, 12, 4.5)
    for color, name in zip(("C0", "C1", "C2", "C3"), COMPARED, strict=True):
        for count, style in ((0, "--"), (poisoned, "-")):
            row = summary(name, count, runs[name, count])
            rounds = np.arange(1, len(row["weights_by_round"]) + 1)
            label = f"{name}, {'poisoned' if count else 'clean'}"
            if count:
                left.plot(rounds, row["weights_by_round"], color=color, label=name)
            right.plot(rounds, row["accuracy_by_round"], style, color=color, label=label)
    left.set(title="weight of the poisoned client", xlabel="round", ylim=(0, None))
    right.set(title="test accuracy", xlabel="round", ylim=(0, 1))
    left.legend(fontsize=8)
    right.legend(fontsize=7)
    figure.tight_layout()
    save(figure, path, dpi=90)


if __name__ == "__main__":
    main()
