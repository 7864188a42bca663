"""Clients that hold handwritten digits, for the experiments on skewed and on poisoned data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bract.client.training import train_locally
from bract.config import FederationConfig
from bract.data.views import client_data, data_spec, test_data
from bract.models.evaluation import evaluate
from bract.models.initialise import initialise
from bract.seeds import derive_seed
from bract.updates.update import Tensors, buffers_of, parameters_of
from experiments.harness.federation import configured_model


class DigitsClient:
    """One client of a federation, its examples in memory.

    ``relabel`` maps the ten labels to others: a permutation poisons the client, its training and
    validation split alike.
    """

    def __init__(self, config: FederationConfig, index: int, relabel: Tensor | None = None) -> None:
        data = client_data(config, index)
        table = torch.arange(10) if relabel is None else relabel
        self.own = (data.images, table[data.labels])
        self.held_out = (data.validation_images, table[data.validation_labels])
        self.config, self.index, self.spec = config, index, data_spec(config.data)

    def train(
        self, arrays: Tensors, server_round: int, proximal_mu: float
    ) -> tuple[Tensors, int, dict[str, float]]:
        """Train as bract's own client does."""
        model = new_model(self.config)
        model.load_state_dict(arrays)
        train_locally(
            model,
            *self.own,
            config=self.config.training.at(server_round, self.config.rounds),
            spec=self.spec,
            seed=derive_seed(self.config.seed, "train", self.index, server_round),
            device=torch.device("cpu"),
            proximal_mu=proximal_mu,
        )
        loss, accuracy = evaluate(model, *self.own, spec=self.spec)
        metrics = {"trained_loss": loss, "trained_accuracy": accuracy}
        return parameters_of(model) | buffers_of(model), len(self.own[0]), metrics

    def score(self, arrays: Tensors) -> tuple[float, float]:
        """Loss and accuracy on the validation split."""
        model = new_model(self.config)
        model.load_state_dict(arrays)
        return evaluate(model, *self.held_out, spec=self.spec)


class Judge:
    """Accuracy on the server's test split."""

    def __init__(self, config: FederationConfig) -> None:
        self.config, self.spec = config, data_spec(config.data)
        self.test = test_data(config.data)

    def __call__(self, arrays: Tensors) -> float:
        """Return the accuracy of ``arrays``."""
        model = new_model(self.config)
        model.load_state_dict(arrays)
        return evaluate(model, *self.test, spec=self.spec)[1]


def start_of(config: FederationConfig) -> Tensors:
    """Return the first global model."""
    model = new_model(config)
    return parameters_of(model) | buffers_of(model)


def new_model(config: FederationConfig) -> nn.Module:
    """Return the configured model, freshly drawn."""
    model = configured_model(config)
    return initialise(model, config.model.init, derive_seed(config.seed, "model"))
