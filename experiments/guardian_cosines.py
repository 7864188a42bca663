"""Which cosine Guardian's upload has with the true update, and why one setting has several.

    python -m experiments.guardian_cosines [--model lenet] [--json]

Rows: a model, how many rounds of an undefended federation it has seen
(`defended_accuracy.SETTINGS`), and what is defended: the gradient of one digit (what is attacked),
of 16, or a client's update of local training (what accuracy is measured with). Each row has the
update's norm and the cosine under each of `operating_points.GUARDIAN`, means over updates.
``scaled`` rows take the gradient of one digit on a fresh model at other lengths: nothing but its
norm differs.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.defenses import Guardian
from bract.defenses.entries import read_defense
from bract.models.initialise import initialise
from bract.seeds import derive_seed
from bract.updates.update import flatten
from experiments.defended_accuracy import Setting
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.federation import Clients
from experiments.harness.images import image_set
from experiments.harness.operating_points import GUARDIAN
from experiments.harness.uploads import plain_spec

LENGTHS = (0.01, 0.1, 1.0, 4.0, 8.0, 10.0, 14.0, 30.0, 100.0)
ROUNDS = (0, 5, 20, 60)
COLUMNS = ("model", "activation", "rounds", "update", "updates", "norm", *GUARDIAN)


def cosines(update: Tensor) -> dict[str, float]:
    """Return the cosine under each operating point, for one update ``(D,)``."""
    found = {}
    for name, chain in GUARDIAN.items():
        guardian = read_defense(chain[0])
        assert isinstance(guardian, Guardian)
        delta = guardian.solve(update, guardian.epsilon)
        found[name] = float(torch.nn.functional.cosine_similarity(update, delta, dim=0))
    return found


def gradients(clients: Clients, count: int, batch: int) -> list[Tensor]:
    """Return gradients of a batch each at the global model, as the attacked clients send them.

    Digits are those that score the attacks, in pixels without normalisation, as they are attacked.
    """
    images = image_set("digits", count * batch, "score")
    spec = plain_spec(clients.spec.image_shape, clients.spec.classes)
    found = []
    for i in range(count):
        part = slice(i * batch, (i + 1) * batch)
        model = clients.model()
        if clients.number:
            model.load_state_dict(clients.arrays)
        else:
            # The fresh model of the leakage rows.
            initialise(model, "default", 0)
        result = train_locally(
            model,
            images.images[part],
            images.labels[part],
            config=TrainingConfig(algorithm="fedsgd", batch_size=batch),
            spec=spec,
            seed=0,
            device=torch.device("cpu"),
        )
        found.append(flatten(result.update))
    return found


def local_updates(clients: Clients) -> list[Tensor]:
    """Return what the clients' next round of local training sends."""
    found = []
    for i, data in enumerate(clients.data):
        model = clients.model()
        model.load_state_dict(clients.arrays)
        result = train_locally(
            model,
            data.images,
            data.labels,
            config=clients.config.training,
            spec=clients.spec,
            seed=derive_seed(clients.config.seed, "train", i, clients.number + 1),
            device=torch.device("cpu"),
        )
        found.append(flatten(result.update))
    return found


def rows_of(model: str, activation: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    clients = Clients(Setting(model, activation, "none", 0).config())
    own = {"model": model, "activation": activation}
    for rounds in ROUNDS:
        while clients.number < rounds:
            clients.round()
        kinds = {
            "gradient of 1": gradients(clients, 16, 1),
            "gradient of 16": gradients(clients, 4, 16),
            "local training": local_updates(clients),
        }
        for kind, updates in kinds.items():
            yield {**own, "rounds": rounds, "update": kind, **mean_of(updates)}
        if not rounds:
            for length in LENGTHS:
                scaled = [g * (length / g.norm()) for g in kinds["gradient of 1"]]
                yield {**own, "rounds": 0, "update": "scaled", **mean_of(scaled)}


def mean_of(updates: list[Tensor]) -> dict[str, Any]:
    """Return the mean norm, and mean cosine under each operating point."""
    found = [cosines(g) for g in updates]
    return {
        "updates": len(updates),
        "norm": statistics.fmean(float(g.norm()) for g in updates),
        **{name: statistics.fmean(one[name] for one in found) for name in GUARDIAN},
    }


def main() -> None:
    """Measure every model."""
    options = parser(__doc__)
    options.add_argument("--model", nargs="+", default=["lenet-strided", "lenet"])
    options.add_argument("--activation", choices=("sigmoid", "relu"), default="sigmoid")
    arguments = parse(options)
    rows: list[dict[str, Any]] = []
    for model in arguments.model:
        note(model)
        rows += rows_of(model, arguments.activation)
    emit(rows, COLUMNS, as_json=arguments.json)


if __name__ == "__main__":
    main()
