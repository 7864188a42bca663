"""Rows of tables reconstructed from one client's upload, by data, batch, training and attack.

    OMP_NUM_THREADS=1 python -m experiments.tables --attack row-span [--clients 4] [--json]

Perceptrons with two hidden layers of 100 and ReLU, freshly drawn for every client, whose rows are
drawn from the training split. One gradient of all rows, or five local epochs of SGD. A feature is
right where its category is equal or its number within a tenth of the column's standard deviation;
``nearest_public`` is the mean share of each row's nearest among rows of the test split. Rows of a
refused upload count as their columns' means and modes. No network and no row chose a setting:
those were chosen on clients of the split ``choose``. Seconds are the process' own, on one thread,
an upload.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bract import Observation
from bract.attacks import Budget, Reconstruction, reconstruct
from bract.config.audit import Tier
from bract.scores.table import RowScorer
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.rows import FIRST_SEED, references_of, send_rows
from experiments.harness.scores import mean

COLUMNS = (
    *("data", "training", "batch", "attack", "clients", "features", "features_least", "exact"),
    *("targets", "refused", "nearest_public", "mode_and_mean", "certain", "certain_right"),
    "cpu_seconds",
)

SURE = 0.8
"""Certainty from which on a cell counts as certain."""

CLIP = 10.0
"""Bound of the update's norm that the noise is declared with; none of these comes near it."""

EPOCHS: dict[str, dict[str, Any]] = {
    "one gradient": {},
    "5 epochs of 32": {"algorithm": "fedavg", "local_epochs": 5, "batch_size": 32, "lr": 0.01},
    "5 epochs of 8": {"algorithm": "fedavg", "local_epochs": 5, "batch_size": 8, "lr": 0.01},
}


@dataclass(frozen=True)
class Setting:
    """One row."""

    data: str
    batch: int
    training: str = "one gradient"
    settings: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.0


def standard_plan(attack: str) -> Iterator[Setting]:
    """Every combination that the documentation speaks of."""
    for data in ("breast-cancer", "fair"):
        for batch in (1, 8, 32):
            yield Setting(data, batch)
        if attack != "tableak":
            for training in ("5 epochs of 32", "5 epochs of 8"):
                yield Setting(data, 32, training)
    if attack != "tableak":
        for data in ("wine", "diabetes", "anes96", "modechoice"):
            yield Setting(data, 8)


def noisy_plan() -> Iterator[Setting]:
    """Gradients under the `noise` defense, attacked by who knows its deviation."""
    for data in ("breast-cancer", "fair"):
        for noise in (1e-4, 3e-4, 1e-3, 3e-3):
            yield Setting(data, 8, noise=noise)


def main() -> None:
    """Attack every setting's clients; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--attack", default="row-span")
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--iterations", type=int)
    arguments.add_argument("--noise", action="store_true", help="gradients under noise, adaptive")
    arguments.add_argument("--split", default="score", choices=tuple(FIRST_SEED))
    options = parse(arguments)
    rows = [
        note_row(
            row(setting, options.attack, options.clients, options.iterations, options.split),
            COLUMNS,
        )
        for setting in (noisy_plan() if options.noise else standard_plan(options.attack))
    ]
    emit(rows, COLUMNS, as_json=options.json)


def row(
    setting: Setting, attack: str, clients: int, iterations: int | None, split: str = "score"
) -> Row:
    """Attack as many clients as asked for, each with a network of its own."""
    references = references_of(setting.data)
    shares: list[float] = []
    baselines: dict[str, list[float]] = {"nearest_public_row": [], "mode_and_mean": []}
    exact, refused, spent, sure, sure_right, cells = 0, 0, 0.0, 0, 0, 0
    targets: list[float] = []
    for seed in range(FIRST_SEED[split], FIRST_SEED[split] + clients):
        sent = send_rows(setting.data, setting.batch, seed=seed, **EPOCHS[setting.training])
        sent = replace(sent, captured=noised(sent.captured, setting.noise, seed))
        scorer = RowScorer(sent.schema, references)
        means = references.baselines(sent.truth.labels, setting.batch, seed=seed)["mode_and_mean"]
        begun = time.process_time()
        budget = Budget(iterations=iterations, max_images=setting.batch)
        tier: Tier = "adaptive" if setting.noise else "oblivious"
        (found,) = reconstruct(
            sent.captured, attack, budget=budget, seed=seed, tier=tier, device="cpu"
        )
        spent += time.process_time() - begun
        named = isinstance(found, Reconstruction)
        images = found.images if isinstance(found, Reconstruction) else means
        scored = scorer.score(
            images,
            sent.truth,
            recovered=found.targets if isinstance(found, Reconstruction) else None,
        )
        refused += not named
        shares += [one.features or 0.0 for one in scored.rows]
        exact += sum(bool(one.exact) for one in scored.rows)
        if scored.label_accuracy is not None:
            targets.append(scored.label_accuracy)
        made = scorer.baselines({"mode_and_mean": means}, scored, sent.truth, setting.batch)
        for name, values in baselines.items():
            values += [one.features or 0.0 for one in made[name]]
        if isinstance(found, Reconstruction) and found.pick.certainty is not None:
            for at, original in zip(scored.order.tolist(), scored.originals, strict=True):
                judged = scorer.cells(images[at], 0.0, found.pick.certainty[at], original, 0.0)[:-1]
                high = [c for c in judged if c.certainty is not None and c.certainty >= SURE]
                cells += len(judged)
                sure += len(high)
                sure_right += sum(bool(c.right) for c in high)
    return {
        "data": setting.data,
        "batch": setting.batch,
        "training": setting.training,
        "attack": attack,
        "noise": setting.noise,
        "clients": clients,
        "iterations": iterations,
        "features": mean(shares),
        "features_least": min(shares),
        "exact": exact / len(shares),
        "targets": mean(targets),
        "refused": refused,
        "nearest_public": mean(baselines["nearest_public_row"]),
        "mode_and_mean": mean(baselines["mode_and_mean"]),
        "certain": sure / cells if cells else None,
        "certain_right": sure_right / sure if sure else None,
        "cpu_seconds": spent / clients,
    }


def noised(seen: Observation, deviation: float, seed: int) -> Observation:
    """Return an upload under Gaussian noise of a deviation, as `noise` declares it."""
    if not deviation:
        return seen
    # Of torch's own generators the adaptive attacker tries the seeds.
    drawn = np.random.default_rng(seed)
    update = {
        name: value + deviation * torch.from_numpy(drawn.standard_normal(value.shape)).float()
        for name, value in seen.update.items()
    }
    defense = {"name": "noise", "std": deviation, "clip": CLIP}
    declaration = seen.declaration.updated({"defenses": (defense,)})
    return replace(seen, update=update, declaration=declaration)


if __name__ == "__main__":
    main()
