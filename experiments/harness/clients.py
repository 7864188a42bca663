"""Clients whose uploads are attacked: one setting, one network, the real training and defense.

Client ``i`` of a row trains network ``(i + i // 8) mod 8`` on images of its own: a second turn of
clients, and pictures that return with the same period, meet other networks than the first. Networks
that are scored on are drawn from other seeds than those that settings were chosen on. What a client
keeps secret is drawn from a number that is neither the network's seed nor the attacker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.captures.observation import Observation
from bract.client.defenses import DefenseChain, ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.models.keylock import Lock
from bract.updates.update import Tensors
from experiments.harness.data_folders import FOLDER
from experiments.harness.federation import correct
from experiments.harness.images import SIZE, ImageSet, held_out_images, image_set, training_images
from experiments.harness.splits import first_seed
from experiments.harness.uploads import fit, network_for, plain_spec, trained_upload

NETWORKS = 8
"""Networks of a row."""

LEARNING_RATE = 0.1

_TRAINED_LR, _TRAINED_BATCH = 2e-3, 64
TRAINED_STEPS = 1500


@dataclass(frozen=True)
class Situation:
    """What clients do in one row.

    Attributes
    ----------
    data, model
        A name of `experiments.harness.images.image_set`, a model of the registry.
    defenses
        A chain of defenses as the configuration has it.
    round
        The round that is attacked; the server steps by what it received in those before.
    batch
        Images of one upload.
    steps
        Local steps of FedSGD (0: the gradient) or FedAvg, over batches of ``step_images``.
    step_images
        Images of one local step; 0 takes all of the upload.
    trained
        Whether the network was trained on other images of the data set beforehand.
    trained_steps
        Steps of that training.
    uploads
        Number of clients.
    init
        How fresh networks are drawn (`bract.models.initialise`).
    activation
        Of the models that take one.
    size
        Side of the images in pixels.
    folder
        Where data sets lie that are not offline.
    """

    data: str
    model: str
    defenses: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    round: int = 1
    batch: int = 1
    steps: int = 0
    step_images: int = 0
    trained: bool = False
    trained_steps: int = TRAINED_STEPS
    uploads: int = 16
    init: str = "default"
    activation: str = "sigmoid"
    size: int = SIZE
    folder: Path = FOLDER

    @property
    def training(self) -> TrainingConfig:
        """Return what a client runs in one round."""
        if not self.steps:
            return TrainingConfig(algorithm="fedsgd", batch_size=self.batch, lr=LEARNING_RATE)
        return TrainingConfig(
            algorithm="fedavg",
            batch_size=self.step_images or self.batch,
            local_steps=self.steps,
            lr=LEARNING_RATE,
        )


@dataclass(frozen=True)
class Upload:
    """What a server captured of one client, and what only the scorer knows.

    Attributes
    ----------
    captured
        As the defense let it out.
    plain
        As it would have been without one.
    history
        The same client's earlier captures.
    truth, labels
        float32 ``(B, C, 32, 32)`` in [0, 1] and int64 ``(B,)``.
    lock
        FedKL's key and lock layers as they were before this round's training; None without FedKL.
    cosine
        Between what was sent and what would have been sent.
    network
        Seed of the network.
    source
        What the image was taken from (`ImageSet.sources`); of a batch the client.
    """

    captured: Observation
    plain: Observation
    history: tuple[Observation, ...]
    truth: Tensor
    labels: Tensor
    lock: Lock | None
    cosine: float
    network: int
    source: int


def images_of(situation: Situation, split: str) -> ImageSet:
    """Return the images of a row: those of all uploads, one after the other."""
    count = situation.uploads * situation.batch
    return image_set(situation.data, count, split, size=situation.size, folder=situation.folder)


def uploads(
    situation: Situation, *, split: str, secret: int, clients: range | None = None
) -> list[Upload]:
    """Run every client, or some of them, up to the round that is attacked.

    Parameters
    ----------
    secret
        What the clients' private numbers are drawn from; no attacker sees it.
    """
    images = images_of(situation, split)
    chosen = range(situation.uploads) if clients is None else clients
    return [_upload(situation, images, i, split, secret) for i in chosen]


def _upload(situation: Situation, images: ImageSet, client: int, split: str, secret: int) -> Upload:
    spec = plain_spec(images.images.shape[1:], images.classes)
    chain = build_defenses([dict(entry) for entry in situation.defenses])
    seed = first_seed(split) + (client + client // NETWORKS) % NETWORKS
    network = _network(situation, chain, seed, spec)
    private = int.from_bytes(sha256(f"{secret} {client}".encode()).digest())
    first = situation.defenses[0]["name"] if situation.defenses else None
    averaged = first == "adadefense" or bool(situation.steps)
    state: Tensors = {}
    history: list[Observation] = []
    for number in range(1, situation.round + 1):
        start = (client * situation.batch + number - 1) % len(images.images)
        chosen = [(start + k) % len(images.images) for k in range(situation.batch)]
        truth, labels = images.images[chosen], images.labels[chosen]
        sent = trained_upload(
            network,
            truth,
            labels,
            training=situation.training,
            spec=spec,
            chain=chain,
            state=state,
            context=ProtectContext(round=number, seed=private),
            seed=seed,
            client=f"client-{client}",
            model=situation.model,
            activation=situation.activation,
        )
        captured = sent.captured
        history.append(captured)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(captured.parameters[name])
                parameter.sub_(captured.update[name], alpha=1.0 if averaged else LEARNING_RATE)
            for name, buffer in network.named_buffers():
                buffer.copy_(sent.buffers[name])
    declaration = replace(captured.declaration, defenses=())
    return Upload(
        captured=captured,
        plain=replace(captured, update=sent.update, declaration=declaration),
        history=tuple(history[:-1]),
        truth=truth,
        labels=labels,
        lock=sent.lock,
        cosine=_cosine(sent.update, captured.update),
        network=seed,
        source=images.sources[client] if situation.batch == 1 else client,
    )


def _network(situation: Situation, chain: DefenseChain, seed: int, spec: DataSpec) -> nn.Module:
    model, activation = situation.model, situation.activation
    if not situation.trained:
        return network_for(
            spec, model, seed, activation=activation, init=situation.init, chain=chain
        )
    # Trained before the defense changes the model: what it adds starts as it draws it.
    network = network_for(spec, model, seed, activation=activation)
    steps = situation.trained_steps
    state, _ = trained_network(situation.data, model, seed, activation, steps)
    network.load_state_dict(state)
    return chain.prepare_model(network)


@cache
def trained_network(
    data: str, name: str, seed: int, activation: str = "sigmoid", steps: int = TRAINED_STEPS
) -> tuple[Tensors, float]:
    """Train a network on images that are not attacked; return its state and test accuracy."""
    images, labels = training_images(data)
    network = network_for(plain_spec(images.shape[1:]), name, seed, activation=activation)
    optimizer = torch.optim.Adam(network.parameters(), lr=_TRAINED_LR)
    fit(network, images, labels, optimizer, steps=steps, batch=_TRAINED_BATCH, seed=seed)
    accuracy = float(correct(network, *held_out_images(data)).mean())
    return {n: v.detach().clone() for n, v in network.state_dict().items()}, accuracy


def trained_accuracy(situation: Situation, split: str) -> float | None:
    """Return the mean test accuracy of a row's trained networks; None of fresh ones."""
    if not situation.trained:
        return None
    seeds = range(first_seed(split), first_seed(split) + min(NETWORKS, situation.uploads))
    of = (situation.data, situation.model)
    how = (situation.activation, situation.trained_steps)
    return sum(trained_network(*of, seed, *how)[1] for seed in seeds) / len(seeds)


def _cosine(update: Tensors, sent: Tensors) -> float:
    before = torch.cat([update[name].flatten() for name in update])
    after = torch.cat([sent[name].flatten() for name in update])
    return float(F.cosine_similarity(before, after, dim=0))
