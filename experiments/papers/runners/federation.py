"""Test accuracy of federations: seeds are units, and each has its split, first model and order."""

from __future__ import annotations

import logging
import statistics
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from bract.config import FederationConfig, build_config
from bract.data.views import test_data
from bract.errors import BractError
from bract.models.keylock import key_locks, with_random_key
from experiments.harness.data_folders import BY_PATH
from experiments.harness.digits import DigitsClient, Judge, start_of
from experiments.harness.federation import Clients, correct
from experiments.harness.result import own
from experiments.harness.simulation import STRATEGIES, simulate
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings

RANDOM_KEYS = 5

Positive = Annotated[int, Field(ge=1)]


class FederationSettings(Settings):
    """One federation.

    Attributes
    ----------
    strategy
        ``centralised``, one client with all examples, or a name of
        `experiments.harness.simulation.STRATEGIES`.
    training, partition
        As in a federation's configuration.
    judged
        Last rounds whose accuracy is averaged.
    watched
        Rounds after which the accuracy is kept as ``accuracy@ROUND``.
    """

    data: str = "digits"
    channels: Literal[1, 3] | None = None
    size: Positive = 32
    model: str = "lenet-strided"
    activation: Literal["sigmoid", "relu"] = "relu"
    strategy: str = "fedavg"
    clients: Positive = 3
    rounds: Positive = 40
    training: dict[str, Any] = {}
    partition: dict[str, Any] = {"kind": "iid"}
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    defenses: tuple[dict[str, Any], ...] = ()
    judged: Positive = 5
    watched: tuple[Positive, ...] = ()
    seeds: Positive = 3

    def config(self, seed: int, context: Context) -> FederationConfig:
        """Return what runs under one seed."""
        data: dict[str, Any] = {
            "name": self.data,
            "image_size": self.size,
            "channels": self.channels,
            "validation": self.validation,
            "partition": self.partition,
        }
        if self.data in BY_PATH:
            data["path"] = str(context.folder)
        return build_config(
            {
                "seed": seed,
                "clients": 1 if self.strategy == "centralised" else self.clients,
                "rounds": self.rounds,
                "model": {"name": self.model, "activation": self.activation},
                "data": data,
                "training": self.training,
                "defenses": [dict(entry) for entry in self.defenses],
            },
            source="experiment",
        )


class FederationRunner(Runner[FederationSettings]):
    """Trains one federation a seed; the sample of a unit is the seed."""

    settings: ClassVar[type[Settings]] = FederationSettings
    code: ClassVar[tuple[str, ...]] = (
        *("bract.client", "bract.strategies"),
        *own("harness.digits", "harness.federation", "harness.simulation"),
        *own("papers.runners.federation"),
    )

    def count(self, settings: FederationSettings) -> int:
        """Return the number of seeds."""
        return settings.seeds

    def run(self, settings: FederationSettings, unit: int, context: Context) -> Measured:
        """Train under one seed and judge the last rounds."""
        before = logging.getLogger("bract").level
        logging.getLogger("bract").setLevel(logging.ERROR)
        try:
            config = settings.config(unit, context)
            if settings.strategy in ("fedavg", "centralised"):
                values = _averaged(settings, config)
            elif settings.strategy in STRATEGIES:
                values = _simulated(settings, config)
            else:
                raise BractError(
                    f"unknown strategy {settings.strategy!r}; expected centralised or one of "
                    f"{', '.join(STRATEGIES)}",
                    code="unknown-name",
                )
        finally:
            logging.getLogger("bract").setLevel(before)
        return Measured([Sample(group=unit, values=values)])


def _averaged(settings: FederationSettings, config: FederationConfig) -> dict[str, float | None]:
    clients = Clients(config)
    images, labels = test_data(config.data)
    inputs = clients.spec.normalise(images)
    curve: dict[int, list[float]] = {}
    for number in range(1, settings.rounds + 1):
        clients.round()
        if number > settings.rounds - settings.judged or number in settings.watched:
            curve[number] = [
                float(correct(model, inputs, labels).mean()) for model in clients.models()
            ]
    values = _values(settings, {n: statistics.fmean(each) for n, each in curve.items()})
    last = curve[settings.rounds]
    if len(last) > 1:
        values |= {f"client{i}": value for i, value in enumerate(last)}
    if key_locks(clients.model()):
        strange = statistics.fmean(
            float(correct(with_random_key(model, draw), inputs, labels).mean())
            for model in clients.models()
            for draw in map(torch.Generator().manual_seed, range(RANDOM_KEYS))
        )
        values |= {"accuracy_random_key": strange, "gap": (values["accuracy"] or 0.0) - strange}
        kept = clients.states[0].items()
        locked = sum(value.numel() for name, value in kept if not name.endswith("key"))
        whole = sum(p.numel() for p in clients.models()[0].parameters()) + locked
        values["lock_share"] = locked / whole
    values["cosine"] = statistics.fmean(clients.cosines)
    return values


def _simulated(settings: FederationSettings, config: FederationConfig) -> dict[str, float | None]:
    if settings.defenses:
        raise BractError(
            f"strategy {settings.strategy!r} is run without defenses here", code="config-conflict"
        )
    members = [DigitsClient(config, index) for index in range(config.clients)]
    strategy = STRATEGIES[settings.strategy](config.clients)
    rows = simulate(strategy, members, start_of(config), settings.rounds, Judge(config))
    curve = {int(row["round"]): float(row["accuracy"]) for row in rows}
    for number in range(len(rows), settings.rounds + 1):
        curve.setdefault(number, 0.0)  # it diverged
    values = _values(settings, curve)
    values["diverged"] = float(any("diverged" in row for row in rows))
    weights = [row["weights"] for row in rows if row["weights"]]
    if weights:
        values["weight0"] = statistics.fmean(each[0] for each in weights)
    return values


def _values(settings: FederationSettings, curve: dict[int, float]) -> dict[str, float | None]:
    last = range(settings.rounds - settings.judged + 1, settings.rounds + 1)
    values: dict[str, float | None] = {
        "accuracy": statistics.fmean(curve[n] for n in last if n in curve)
    }
    return values | {f"accuracy@{n}": curve[n] for n in settings.watched if n in curve}
