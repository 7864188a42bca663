"""What one client sends: a batch's gradient, or local training, through its defenses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks.problem.target_model import target_model_of
from bract.captures.observation import ClientDeclaration, Observation
from bract.client.defenses import DefenseChain, ProtectContext
from bract.client.training import planned_steps, train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.keylock import Lock
from bract.updates.update import Tensors, buffers_of, parameters_of


@dataclass(frozen=True)
class Sent:
    """One client's upload, and what only a scorer knows of it.

    Attributes
    ----------
    captured
        As the defenses let it out.
    update, buffers
        Before the defenses; buffers after training.
    lock
        FedKL's key and lock layers before this round's training; None without FedKL.
    """

    captured: Observation
    update: Tensors
    buffers: Tensors
    lock: Lock | None


def plain_spec(shape: Sequence[int], classes: int = 10) -> DataSpec:
    """Describe images of ``shape``, ``(C, H, W)``, that are not normalised."""
    channels, height, width = shape
    return DataSpec((channels, height, width), classes, (0.0,) * channels, (1.0,) * channels)


def network_for(
    spec: DataSpec,
    model: str,
    seed: int,
    *,
    activation: str = "sigmoid",
    init: str = "default",
    chain: DefenseChain | None = None,
) -> nn.Module:
    """Draw a fresh network for images of ``spec``, as the defenses prepare it."""
    channels, size, _ = spec.image_shape
    made = create_model(
        model, classes=spec.classes, channels=channels, image_size=size, activation=activation
    )
    return initialise(made if chain is None else chain.prepare_model(made), init, seed)


def captured_network(captured: Observation) -> nn.Module:
    """Return the network that a client was sent, in evaluation mode."""
    network = target_model_of(captured).model
    network.load_state_dict(captured.parameters | captured.buffers)
    return network.eval()


def fit(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    batch: int,
    seed: int,
) -> None:
    """Train on batches drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = torch.randint(len(images), (batch,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(images[drawn]), labels[drawn]).backward()
        optimizer.step()


def gradient_upload(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    spec: DataSpec | None = None,
    client: str = "client-0",
    **declared: Any,
) -> Observation:
    """Return what a server captures of one batch's undefended gradient.

    Parameters
    ----------
    images, labels
        float32 ``(B, C, size, size)`` in [0, 1] and int64 ``(B,)``.
    spec
        How the client normalises; `plain_spec` by default.
    declared
        Further fields of the declaration: ``model`` and ``activation``.
    """
    spec = spec or plain_spec(images.shape[1:])
    sent = {name: value.clone() for name, value in buffers_of(network).items()}
    loss = F.cross_entropy(network(spec.normalise(images)), labels)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    returned = {name: value.clone() for name, value in buffers_of(network).items()}
    network.load_state_dict(sent, strict=False)
    return Observation(
        round=1,
        client=client,
        parameters=parameters_of(network),
        buffers=sent,
        returned_buffers=returned,
        update={n: g for (n, _), g in zip(network.named_parameters(), gradients, strict=True)},
        declaration=ClientDeclaration(
            algorithm="fedsgd",
            image_shape=spec.image_shape,
            classes=spec.classes,
            mean=spec.mean,
            std=spec.std,
            local_steps=1,
            batch_size=len(images),
            num_examples=len(images),
            **declared,
        ),
    )


def trained_upload(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    training: TrainingConfig,
    spec: DataSpec,
    chain: DefenseChain,
    state: Tensors,
    context: ProtectContext,
    seed: int,
    client: str,
    model: str,
    activation: str = "sigmoid",
) -> Sent:
    """Train as a client does, defend the update, and return what a server captures.

    Parameters
    ----------
    state
        Private state of the defenses, changed in place: kept from round to round.
    context
        The round, and what the client's private numbers are drawn from.
    seed
        Of the order of the examples.
    """
    chain.attach(network, state, context)
    lock = _lock_of(chain, state)
    parameters, buffers = parameters_of(network), buffers_of(network)
    found = train_locally(
        network,
        images,
        labels,
        config=training,
        spec=spec,
        seed=seed,
        device=torch.device("cpu"),
    )
    context = replace(context, model=network, images=images, labels=labels)
    captured = Observation(
        round=context.round,
        client=client,
        parameters=parameters,
        buffers=buffers,
        update=chain.protect(found.update, state, context),
        declaration=ClientDeclaration(
            algorithm=training.algorithm,
            model=model,
            activation=activation,
            image_shape=spec.image_shape,
            classes=spec.classes,
            mean=spec.mean,
            std=spec.std,
            lr=training.lr,
            optimizer=training.optimizer,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            local_steps=planned_steps(training, len(images)),
            batch_size=training.batch_size,
            num_examples=len(images),
            defenses=tuple(chain.public()),
        ),
    )
    return Sent(captured, found.update, found.buffers, lock)


def _lock_of(chain: DefenseChain, state: Tensors) -> Lock | None:
    own = {n.removeprefix("fedkl."): v.clone() for n, v in state.items() if n.startswith("fedkl.")}
    declared = [d for d in chain.public() if d["name"] == "fedkl"]
    return Lock.load(own, relu=declared[0]["relu"]) if declared else None
