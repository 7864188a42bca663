"""Decision boundaries of FedAvg, FedBoosting and centralised training on two 2-D Gaussian sets.

    python -m experiments.gaussians [--seeds 5] [--rounds 4] [--samples 40000] [--json]

Thesis, section 4.3.1: two clients whose points come from normal distributions of other centres
and spreads, 9:1 split, a 2-8-2 network with sigmoid, Adam 0.003, batch 8, one local epoch. The
text gives neither the centres nor how points get their two classes, so three settings are run:
``two-class``, each client holds both classes around its own centres; ``drawn``, the same with
centres and spreads drawn anew for every seed; ``one-class``, each client holds one Gaussian that
is one class.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bract.seeds import derive_seed
from bract.updates.update import Tensors
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.pictures import canvas, save
from experiments.harness.points import SETTINGS, Points, network, score
from experiments.harness.scores import interval
from experiments.harness.simulation import STRATEGIES, simulate

COMPARED = ("fedavg-uniform", "fedboosting", "fedboosting-proportional")


def main() -> None:
    """Train every seed and strategy, print the table, draw the first seed."""
    arguments = parser(__doc__, picture="gaussians-cpu")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--samples", type=int, default=40000, help="points a client")
    options = parse(arguments)
    rows, drawn = [], {}
    for setting in SETTINGS:
        scores: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            clients = [
                Points(setting, i, options.samples, seed) for i in range(len(SETTINGS[setting]))
            ]
            models = run(clients, options, seed)
            for name, (accuracy, arrays, weights) in models.items():
                note(f"{setting} seed {seed} {name}: {accuracy:.4f}")
                scores.setdefault(name, []).append(accuracy)
                shares.setdefault(name, []).append(weights[0] if weights else 0.5)
                if seed == 0:
                    drawn[setting, name] = (arrays, clients, accuracy)
        for name, values in scores.items():
            mean, half = interval(values)
            pairs = zip(values, scores["fedavg-uniform"], strict=True)
            ahead, ahead_half = interval([a - b for a, b in pairs])
            rows.append(
                {
                    "setting": setting,
                    "strategy": name,
                    "accuracy": mean,
                    "interval": half,
                    "against_fedavg": ahead,
                    "against_fedavg_interval": ahead_half,
                    "accuracies": values,
                    "weight_of_first": float(np.mean(shares[name])),
                }
            )
    draw(drawn, options.picture)
    emit(
        rows,
        (
            "setting",
            "strategy",
            "accuracy",
            "interval",
            "against_fedavg",
            "against_fedavg_interval",
            "weight_of_first",
        ),
        as_json=options.json,
    )


def run(
    clients: list[Points], options: argparse.Namespace, seed: int
) -> dict[str, tuple[float, Tensors, list[float]]]:
    """Train every strategy and the centralised model from one start."""
    test = (
        torch.cat([c.held_out[0] for c in clients]),
        torch.cat([c.held_out[1] for c in clients]),
    )
    start = network(derive_seed(seed, "model")).state_dict()

    def judge(arrays: Tensors) -> float:
        return score(arrays, *test)[1]

    found = {}
    for name in COMPARED:
        rows = simulate(STRATEGIES[name](len(clients)), clients, start, options.rounds, judge)
        found[name] = (rows[-1]["accuracy"], rows[-1]["arrays"], rows[-1]["weights"])
    pooled = Points.pooled(clients, seed)
    arrays = start
    for number in range(options.rounds):
        arrays, _, _ = pooled.train(arrays, number + 1, 0.0)
    found["centralised"] = (judge(arrays), arrays, [])
    return found


@torch.no_grad()
def draw(drawn: dict[tuple[str, str], Any], path: Path) -> None:
    """Draw one row a setting and one column a way of training, with the held-out points."""
    names = [*COMPARED, "centralised"]
    figure, axes = canvas(len(SETTINGS), len(names), 14, 10, squeeze=False)
    side = torch.linspace(-6, 6, 240)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(-1, 2)
    for i, setting in enumerate(SETTINGS):
        for j, name in enumerate(names):
            arrays, clients, accuracy = drawn[setting, name]
            model = network(0)
            model.load_state_dict(arrays)
            share = torch.softmax(model(grid), 1)[:, 1].reshape(240, 240)
            axis = axes[i, j]
            axis.contourf(side, side, share, levels=11, cmap="coolwarm", alpha=0.6)
            axis.contour(side, side, share, levels=[0.5], colors="black", linewidths=1.5)
            for client, marker in zip(clients, "ox", strict=True):
                x, y = client.held_out[0][:150], client.held_out[1][:150]
                axis.scatter(
                    x[:, 0], x[:, 1], c=y, cmap="coolwarm", vmin=0, vmax=1, s=8, marker=marker
                )
            axis.set(title=f"{name}: {accuracy:.4f}", xticks=[], yticks=[], xlim=(-6, 6))
            axis.set_ylim(-6, 6)
        axes[i, 0].set_ylabel(setting)
    figure.suptitle("Decision boundaries; o first client, x second client (held-out points)")
    figure.tight_layout()
    save(figure, path, dpi=80)


if __name__ == "__main__":
    main()
