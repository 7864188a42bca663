"""The sections of a federation's configuration: data, model, training, strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class Section(BaseModel):
    """A section: an unknown key is an error, and no value changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class IidPartition(Section):
    """Every client holds a random share of equal size."""

    kind: Literal["iid"] = "iid"


class DirichletPartition(Section):
    """Class shares drawn from Dirichlet(alpha): the smaller alpha, the less alike the clients."""

    kind: Literal["dirichlet"]
    alpha: Annotated[float, Field(gt=0.0)] = 0.5
    min_examples: Positive = 1


class ShardsPartition(Section):
    """Examples sorted by label and cut into shards; each client holds a few of them."""

    kind: Literal["shards"]
    shards_per_client: Positive = 2


class SizesPartition(Section):
    """Clients of stated sizes, drawn at random: ``sizes[i]`` examples for client ``i``."""

    kind: Literal["sizes"]
    sizes: list[Positive]


Partition = Annotated[
    IidPartition | DirichletPartition | ShardsPartition | SizesPartition,
    Field(discriminator="kind"),
]


class DataConfig(Section):
    """What the clients learn from, and how it is split over them.

    ``normalisation`` is declared here once: training, attack and scoring all use it.
    """

    name: str = "digits"
    path: Path | None = None
    download: bool = False
    image_size: Annotated[int, Field(ge=8, le=512)] = 32
    channels: Literal[1, 3] | None = None
    normalisation: Literal["dataset", "none"] = "dataset"
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    partition: Partition = IidPartition()


class ModelConfig(Section):
    """The global model: a name of the registry, or ``package.module:callable``."""

    name: str = "lenet"
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    init: Literal["default", "uniform"] = "default"


class TrainingConfig(Section):
    """What a client does with the model in one round.

    ``fedsgd`` uploads the gradient of one batch; ``fedavg`` trains for ``local_steps`` batches,
    or ``local_epochs`` passes where ``local_steps`` is not given, and uploads the difference.
    """

    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    batch_size: Positive = 8
    local_epochs: Positive = 1
    local_steps: Positive | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Annotated[float, Field(gt=0.0)] = 0.1
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0


class StrategySection(Section):
    """What every strategy has."""

    server_lr: Annotated[float, Field(gt=0.0)] = 1.0
    fraction: Fraction = 1.0
    tolerate_failures: bool = False
    timeout: Annotated[float, Field(gt=0.0)] = 600.0


class FedAvgConfig(StrategySection):
    """Average the updates, by number of examples or uniformly."""

    name: Literal["fedavg"] = "fedavg"
    weighting: Literal["examples", "uniform"] = "examples"


class FedProxConfig(StrategySection):
    """FedAvg whose clients add ``proximal_mu / 2 * ||w - w_global||^2`` to their loss."""

    name: Literal["fedprox"]
    weighting: Literal["examples", "uniform"] = "examples"
    proximal_mu: Annotated[float, Field(ge=0.0)] = 0.1


class FedBoostingConfig(StrategySection):
    """Weigh each client by how its fused model does on every client's validation split."""

    name: Literal["fedboosting"]
    weighting: Literal["softmax", "proportional"] = "softmax"
    signal: Literal["accuracy", "loss"] = "accuracy"
    fusing: Literal["fixed", "random"] = "fixed"
    p_hat: Annotated[float, Field(gt=0.5, le=1.0)] = 0.9


STRATEGY_SECTIONS: dict[str, type[StrategySection]] = {
    "fedavg": FedAvgConfig,
    "fedboosting": FedBoostingConfig,
    "fedprox": FedProxConfig,
}


def _strategy_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get("name", "fedavg")
    return getattr(value, "name", None)


StrategyConfig = Annotated[
    Annotated[FedAvgConfig, Tag("fedavg")]
    | Annotated[FedBoostingConfig, Tag("fedboosting")]
    | Annotated[FedProxConfig, Tag("fedprox")],
    Discriminator(_strategy_name),
]


KINDS: dict[tuple[str, ...], Mapping[str, type[Section]]] = {
    ("strategy",): STRATEGY_SECTIONS,
    ("data", "partition"): {
        "iid": IidPartition,
        "dirichlet": DirichletPartition,
        "shards": ShardsPartition,
        "sizes": SizesPartition,
    },
}
"""Where the value of one key (``name``, ``kind``) chooses the section's class, and the choices."""
