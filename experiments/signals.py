"""Signals that come back from one gradient: heart beats, and windows to forecast from.

    OMP_NUM_THREADS=1 python -m experiments.signals [--clients 4] [--what beat] [--json]

Made-up beats of 187 values through convolutions over time, and made-up days of 24 values through an
LSTM that forecasts the next one; each client's gradient of one batch at a fresh network of its own.
``correlation`` and ``error`` (root mean square, share of the range in per cent) are means over the
signals, paired so that errors are least; ``late`` is the error over the last half, ``worst`` the
largest one, ``within`` the share of signals of 1 % or less. Restarts and iterations are those of
the attack's budget.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.captures.observation import ClientDeclaration, Observation
from bract.config import DataConfig
from bract.data.beats import SignalDataset
from bract.data.sources import DATASETS
from bract.data.views import test_data
from bract.models import create_model
from bract.models.losses import loss_of
from bract.scores.signal import correlation
from bract.updates.update import buffers_of, parameters_of
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row

COLUMNS = (
    *("what", "model", "batch", "attack", "iterations", "restarts", "clients"),
    *("correlation", "error", "late", "worst", "within", "seconds"),
)


@dataclass(frozen=True)
class Setting:
    """What a client holds, and how it is attacked."""

    what: str
    model: str
    batch: int
    attack: str
    iterations: int
    restarts: int


SETTINGS = (
    Setting("beat", "conv1d", 1, "ig", 600, 1),
    Setting("beat", "conv1d", 1, "gauss-newton", 100, 4),
    Setting("beat", "conv1d", 8, "ig", 600, 1),
    Setting("window", "lstm", 1, "gauss-newton", 100, 4),
    Setting("window", "lstm", 1, "gauss-newton", 400, 32),
    Setting("window", "lstm", 1, "ig", 2000, 4),
    Setting("window", "lstm", 8, "ig", 600, 1),
    Setting("window", "conv1d", 1, "gauss-newton", 100, 4),
    Setting("window", "conv1d", 8, "ig", 600, 1),
)
NAMES = {"beat": "made-up-beats", "window": "made-up-loads"}


def main() -> None:
    """Attack every setting; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--what", choices=tuple(NAMES), help="only rows of this one")
    options = parse(arguments)
    chosen = [one for one in SETTINGS if options.what in (None, one.what)]
    rows = [note_row(row_of(setting, options.clients), COLUMNS) for setting in chosen]
    emit(rows, COLUMNS, as_json=options.json)


def row_of(setting: Setting, clients: int) -> Row:
    """Return what comes back of as many clients' signals."""
    begun = time.perf_counter()
    correlations: list[float] = []
    errors: list[float] = []
    late: list[float] = []
    for client in range(clients):
        seen, signals = upload(setting, client)
        budget = Budget(iterations=setting.iterations, restarts=setting.restarts)
        (found,) = reconstruct(seen, setting.attack, budget=budget, seed=client, device="cpu")
        made = found.images if isinstance(found, Reconstruction) else torch.full_like(signals, 0.5)
        squares = (made[:, None] - signals[None]).square().mean(dim=(2, 3))
        apart = squares.mean(dim=2).sqrt()
        half = squares[..., squares.shape[-1] // 2 :].mean(dim=2).sqrt()
        rows, columns = linear_sum_assignment(apart.double().numpy())
        correlations += correlation(made[rows], signals[columns]).tolist()
        errors += (100.0 * apart[rows, columns]).tolist()
        late += (100.0 * half[rows, columns]).tolist()
    return {
        **vars(setting),
        "clients": clients,
        "correlation": sum(correlations) / len(correlations),
        "error": sum(errors) / len(errors),
        "late": sum(late) / len(late),
        "worst": max(errors),
        "within": sum(error <= 1.0 for error in errors) / len(errors),
        "seconds": (time.perf_counter() - begun) / clients,
    }


def upload(setting: Setting, client: int) -> tuple[Observation, Tensor]:
    """Return one client's gradient of one batch, and its signals ``(B, channels, 1, length)``."""
    data = DataConfig(name=NAMES[setting.what], input="signal")
    made_up = DATASETS[data.name]
    assert isinstance(made_up, SignalDataset)
    schema = made_up.schema(data)
    values, labels = test_data(data)
    mine = slice(client * setting.batch, (client + 1) * setting.batch)
    signals, targets = values[mine], labels[mine]
    outputs = schema.outputs or 5
    torch.manual_seed(client)
    model = create_model(
        setting.model, classes=outputs, channels=schema.channels, image_size=1, signal=schema
    )
    mean, std = schema.feature_moments()
    before, held = parameters_of(model), buffers_of(model)
    inputs = (signals - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    loss = loss_of(schema.objective).mean(model(inputs), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    declared: dict[str, Any] = {"batch_size": setting.batch, "num_examples": setting.batch}
    declaration = ClientDeclaration(
        algorithm="fedsgd",
        model=setting.model,
        input="signal",
        image_shape=schema.shape,
        classes=outputs,
        mean=mean,
        std=std,
        signal=schema,
        loss=schema.objective,
        **declared,
    )
    return (
        Observation(
            round=1,
            client=f"client-{client}",
            parameters=before,
            buffers=held,
            update=dict(zip(before, gradients, strict=True)),
            declaration=declaration,
        ),
        signals,
    )


if __name__ == "__main__":
    main()
