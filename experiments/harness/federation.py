"""A federation without processes: bract's own training, defenses and aggregation, in a loop."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor, nn

from bract.client.defenses import DefenseChain, ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.config import FederationConfig
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.models.dropout import with_dropout
from bract.models.initialise import initialise
from bract.protocol.records import Contribution
from bract.seeds import derive_seed
from bract.strategies.aggregation import aggregate, fedavg_weights
from bract.updates.ties import ties_of
from bract.updates.update import Tensors, buffers_of, flatten, parameters_of


class Clients:
    """A federation without processes: bract's own training, defenses and aggregation, in a loop.

    ``tests/experiments/test_accuracy_benchmark.py`` holds it to the real client and server.
    """

    def __init__(self, config: FederationConfig) -> None:
        self.config, self.spec = config, data_spec(config.data)
        self.data = [client_data(config, i) for i in range(config.clients)]
        self.chains = [build_defenses(config.defenses) for _ in self.data]
        self.states: list[Tensors] = [{} for _ in self.data]
        self.number = 0
        self.private = secrets.randbits(256)
        model = initialise(self.model(), config.model.init, derive_seed(config.seed, "model"))
        self.arrays = parameters_of(model) | buffers_of(model)
        self.norms: list[float] = []
        self.cosines: list[float] = []

    def model(self) -> nn.Module:
        """Return the shared model, as the defenses change it."""
        return configured_model(self.config, self.chains[0])

    def load(self, model: nn.Module) -> None:
        """Give a model the global tensors, each under all of its names."""
        tied = {name: self.arrays[first] for name, first in ties_of(model).items()}
        model.load_state_dict(self.arrays | tied)

    def models(self) -> list[nn.Module]:
        """Return the global model as it stands; with FedKL one for each client's own key."""
        made = []
        for i in range(len(self.data) if self.chains[0].keeps_model else 1):
            model = self.model()
            self.load(model)
            self.chains[i].attach(model, self.states[i], self.context(i))
            made.append(model.eval())
        return made

    def context(self, client: int) -> ProtectContext:
        """Return what a client knows; its secrets follow from nothing that the server knows."""
        return ProtectContext(round=self.number, seed=self.private + client)

    def round(self) -> None:
        """Train, defend and aggregate once."""
        self.number += 1
        answers = [self.answer(i) for i in range(len(self.data))]
        weights = fedavg_weights(answers, "examples")
        self.arrays = aggregate(
            self.arrays, answers, weights, server_lr=self.config.strategy.server_lr
        )

    def answer(self, client: int) -> Contribution:
        """Return what one client sends."""
        data, chain, context = self.data[client], self.chains[client], self.context(client)
        model = self.model()
        self.load(model)
        chain.attach(model, self.states[client], context)
        found = train_locally(
            model,
            data.images,
            data.labels,
            config=self.config.training.at(self.number, self.config.rounds),
            spec=self.spec,
            seed=derive_seed(self.config.seed, "train", client, self.number),
            device=torch.device("cpu"),
        )
        most = self.config.training.batch_size
        sent = chain.protect(
            found.update,
            self.states[client],
            ProtectContext(
                round=context.round,
                seed=context.seed,
                model=model,
                images=self.spec.normalise(found.trained_on(data.images, most)),
                labels=data.labels[found.used[:most]],
            ),
        )
        self.norms.append(float(flatten(found.update).norm()))
        self.cosines.append(chain.report.get("cosine", 1.0))
        return Contribution(
            node_id=client + 1,
            client=f"client-{client}",
            update=sent,
            buffers=found.buffers,
            num_examples=len(found.used),
        )


def configured_model(config: FederationConfig, chain: DefenseChain | None = None) -> nn.Module:
    """Return the configured model, as the defenses and dropout change it."""
    spec = data_spec(config.data)
    channels, size, _ = spec.image_shape
    made = create_model(
        config.model.name,
        classes=spec.classes,
        channels=channels,
        image_size=size,
        **spec.schemas,
        activation=config.model.activation,
    )
    if chain is not None:
        made = chain.prepare_model(made)
    return with_dropout(made, config.training.dropout, classes=spec.classes)


@torch.no_grad()
def correct(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return 1.0 where the model is right and 0.0 where it is not, ``(N,)``."""
    right: Tensor = model.eval()(inputs).argmax(1) == labels
    return right.float()
