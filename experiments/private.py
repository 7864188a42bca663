"""Per-example privacy: what it costs, what it leaves of accuracy, and what can be measured of it.

    python -m experiments.private [--part overhead] [--runs 200] [--json]

``overhead``: processor time of local steps on one thread, of plain training, of ours and of Opacus'
own loop (`PrivacyEngine`), ResNet-20 with group for batch normalisation and LeNet. ``accuracy``:
digits at epsilon 8, one client, ours and Opacus' own loop with the same noise, steps and seeds of
the model. ``epsilon``: training by our code on one-hot canaries, each included by a fair coin, of
whom each gradient is clipped to its own direction; the bound that one run gives (Steinke et al.
2023) is held against the accountant's epsilon.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bract.audit.questions.epsilon.bound import best_bound
from bract.client.accounting import Mechanism, total_epsilon
from bract.client.private_training import private_mechanism, train_privately
from bract.client.training import train_locally
from bract.config import FederationConfig, build_config
from bract.crypto.randomness import SecretStream
from bract.data.views import client_data, data_spec, test_data
from bract.models import create_model
from bract.models.evaluation import evaluate
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row

COLUMNS = (
    *("name", "way", "model", "batch", "steps", "runs", "cpu_seconds", "ratio"),
    *("epsilon", "accuracy", "least", "most", "difference", "error", "bound", "above"),
)
DELTA = 1e-5
CPU = torch.device("cpu")
Training = Callable[[nn.Module, FederationConfig, Tensor, Tensor], None]


def main() -> None:
    """Run a part; then print the table or JSON."""
    arguments = parser(__doc__, "threads")
    arguments.add_argument("--part", choices=tuple(PARTS), default="overhead")
    arguments.add_argument("--runs", type=int, default=0, help="0: the part's own")
    options = parse(arguments)
    warnings.simplefilter("ignore")
    rows = [note_row(row, COLUMNS) for row in PARTS[options.part](options.runs)]
    emit(rows, COLUMNS, as_json=options.json)


def overhead(runs: int) -> list[Row]:
    """Return one row a model and way of training."""
    rows = []
    for name, side, channels, batch in (("lenet", 32, 1, 32), ("resnet20", 32, 3, 32)):
        model = create_model(name, classes=10, channels=channels, image_size=side)
        model = ModuleValidator.fix(model.train())
        steps, count = runs or 4, 256
        section = {"batch_size": batch, "local_steps": steps, "lr": 0.1}
        config = _config(section | {"private": {"noise_multiplier": 1.0}})
        images = torch.rand(count, channels, side, side)
        labels = torch.arange(count) % 10
        seconds = {
            way: _cpu(partial(_on_a_copy, train, model, config, images, labels))
            for way, train in (("plain", _plain), ("ours", _ours), ("opacus", _opacus))
        }
        rows += [
            {
                "name": "overhead",
                "way": way,
                "model": name if name == "lenet" else f"{name}, group normalisation",
                "batch": batch,
                "steps": steps,
                "runs": 3,
                "cpu_seconds": round(found / steps, 4),
                "ratio": round(found / seconds["plain"], 2),
            }
            for way, found in seconds.items()
        ]
    return rows


def accuracy(runs: int) -> list[Row]:
    """Return a row for ours and one for Opacus' own loop, on digits at epsilon 8."""
    section: dict[str, Any] = {"batch_size": 64, "local_epochs": 30, "lr": 0.5}
    section |= {"private": {"epsilon": 8.0, "max_grad_norm": 1.0}}
    config = _config(section)
    spec, held_out = data_spec(config.data), test_data(config.data)
    data = client_data(config, 0)
    found: dict[str, list[float]] = {"ours": [], "opacus": []}
    seconds = dict.fromkeys(found, 0.0)
    for seed in range(runs or 5):
        for way, train in (("ours", _ours), ("opacus", _opacus)):
            torch.manual_seed(seed)
            model = create_model("lenet-strided", classes=10, channels=1, image_size=16,
                                 activation="relu")  # fmt: skip
            begun = time.process_time()
            train(model, config, data.images, data.labels)
            seconds[way] += time.process_time() - begun
            found[way].append(evaluate(model, *held_out, spec=spec, device=CPU)[1])
    apart = np.subtract(found["ours"], found["opacus"])
    mechanism = _mechanism(config, len(data.images))
    return [
        {
            "name": "accuracy",
            "way": way,
            "model": "lenet-strided",
            "batch": 64,
            "steps": mechanism.steps,
            "runs": len(values),
            "cpu_seconds": round(seconds[way] / len(values), 2),
            "epsilon": round(total_epsilon({mechanism: 1}, DELTA), 3),
            "accuracy": round(fmean(values), 4),
            "least": round(min(values), 4),
            "most": round(max(values), 4),
            "difference": round(float(apart.mean()), 4),
            "error": round(float(apart.std(ddof=1)) / len(apart) ** 0.5, 4),
        }
        for way, values in found.items()
    ]


def epsilon(runs: int) -> list[Row]:
    """Return a row a noise multiplier: how often the measured epsilon is above the accountant's."""
    rows = []
    for multiplier, batch, steps in ((1.0, 100, 60), (2.0, 500, 20), (0.7, 1000, 1)):
        begun, bounds, canaries = time.process_time(), [], 1000
        generator = np.random.default_rng(3511)
        section = {"batch_size": batch, "local_steps": steps, "lr": 1.0}
        private = {"noise_multiplier": multiplier, "max_grad_norm": 1.0}
        config = _config(section | {"private": private})
        # The accountant's rate is that of all canaries, as if every one were a member.
        mechanism = Mechanism("sampled", multiplier, batch / canaries, steps)
        for _ in range(runs or 200):
            included = generator.random(canaries) < 0.5
            images = torch.eye(canaries)[torch.from_numpy(included)].view(-1, 1, 1, canaries)
            linear = nn.Linear(canaries, 1, bias=False)
            nn.init.zeros_(linear.weight)
            model = nn.Sequential(nn.Flatten(), linear)
            # A target far away: every gradient is longer than the bound, and clipped to it.
            result = train_privately(
                model,
                images,
                torch.full((len(images),), -1e6),
                config=config.training,
                spec=SimpleNamespace(normalise=lambda x: x, loss="mse"),  # type: ignore[arg-type]
                device=CPU,
                mechanism=mechanism,
                stream=SecretStream.fresh(),
            )
            scores = next(iter(result.update.values())).flatten().double().numpy()
            bounds.append(best_bound([scores], included, DELTA).epsilon)
        spent = total_epsilon({mechanism: 1}, DELTA)
        rows.append(
            {
                "name": "epsilon",
                "way": f"noise {multiplier:g}, rate {batch / canaries:g}",
                "model": f"{canaries} canaries",
                "batch": batch,
                "steps": steps,
                "runs": len(bounds),
                "epsilon": round(spent, 3),
                "bound": round(fmean(bounds), 3),
                "most": round(max(bounds), 3),
                "above": sum(bound > spent for bound in bounds),
                "cpu_seconds": round(time.process_time() - begun, 1),
            }
        )
    return rows


def _config(section: dict[str, Any]) -> FederationConfig:
    return build_config(
        {
            "clients": 1,
            "rounds": 1,
            "data": {"image_size": 16, "validation": 0.0},
            "training": section,
        }
    )


def _mechanism(config: FederationConfig, count: int) -> Mechanism:
    found = private_mechanism(config, count)
    assert found is not None
    return found


def _plain(model: nn.Module, config: FederationConfig, images: Tensor, labels: Tensor) -> None:
    train_locally(
        model,
        images,
        labels,
        config=config.training,
        spec=data_spec(config.data),
        seed=0,
        device=CPU,
    )


def _ours(model: nn.Module, config: FederationConfig, images: Tensor, labels: Tensor) -> None:
    train_privately(
        model,
        images,
        labels,
        config=config.training,
        spec=data_spec(config.data),
        device=CPU,
        mechanism=_mechanism(config, len(images)),
        stream=SecretStream.fresh(),
    )


def _opacus(model: nn.Module, config: FederationConfig, images: Tensor, labels: Tensor) -> None:
    """Train as Opacus' own documentation does, for as many steps as ours."""
    mechanism, section = _mechanism(config, len(images)), config.training
    assert section.private is not None
    spec = data_spec(config.data)
    loader = DataLoader(TensorDataset(images, labels), batch_size=section.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=section.lr)
    wrapped, noisy, sampled = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=mechanism.multiplier,
        max_grad_norm=section.private.max_grad_norm,
    )
    done = 0
    while done < mechanism.steps:
        for inputs, target in sampled:
            noisy.zero_grad()
            if len(inputs):
                nn.functional.cross_entropy(wrapped(spec.normalise(inputs)), target).backward()
                noisy.step()
            done += 1
            if done == mechanism.steps:
                break
    wrapped.remove_hooks()


def _cpu(work: Callable[[], object]) -> float:
    """Return the least processor time of three."""
    found = []
    for _ in range(3):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return min(found)


def _on_a_copy(train: Training, model: nn.Module, *rest: Any) -> None:
    import copy

    train(copy.deepcopy(model), *rest)


PARTS: dict[str, Callable[[int], list[Row]]] = {
    "overhead": overhead,
    "accuracy": accuracy,
    "epsilon": epsilon,
}


if __name__ == "__main__":
    main()
