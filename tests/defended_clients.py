"""Observations of clients that train and defend as bract's own do, and what they kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bract import Observation
from bract.attacks import Problem
from bract.attacks.problem.case import open_case
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.models import create_model
from bract.models.initialise import initialise
from bract.schema import ClientDeclaration
from bract.updates.update import Tensors, buffers_of, parameters_of


@dataclass(frozen=True)
class Captured:
    """What the server saw, and what it did not: the truth and the client's state beforehand.

    ``images`` and ``labels`` are in the order in which the client used them.
    """

    seen: Observation
    images: Tensor
    labels: Tensor
    state: Tensors


def capture(
    images: Tensor,
    labels: Tensor,
    entry: dict[str, Any],
    *,
    model: str,
    init: str = "default",
    seed: int = 0,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float = 0.1,
    momentum: float = 0.0,
    proximal_mu: float = 0.0,
    buffers_return: bool = False,
    client: str = "client-0",
    mean: float = 0.3,
    std: float = 0.4,
) -> Captured:
    """Train through `bract.client.training` and protect through the real chain of defenses."""
    channels, size, _ = images.shape[1:]
    chain = build_defenses([entry])
    network = create_model(model, classes=10, channels=channels, image_size=size)
    torch.manual_seed(0)
    network = initialise(chain.prepare_model(network), init, 0)
    sent, buffers = parameters_of(network), buffers_of(network)
    context = ProtectContext(seed=seed)
    state: Tensors = {}
    chain.attach(network, state, context)
    held = {name: value.clone() for name, value in state.items()}
    spec = DataSpec((channels, size, size), 10, (mean,) * channels, (std,) * channels)
    batch = batch_size or len(images)
    training = TrainingConfig(
        algorithm="fedsgd" if steps is None else "fedavg",
        batch_size=batch,
        local_steps=steps,
        lr=lr,
        momentum=momentum,
    )
    network.train()
    result = train_locally(
        network,
        images,
        labels,
        config=training,
        spec=spec,
        seed=0,
        device=torch.device("cpu"),
        proximal_mu=proximal_mu,
    )
    protected = chain.protect(
        result.update, state, replace(context, model=network, images=images, labels=labels)
    )
    declaration = ClientDeclaration(
        algorithm=training.algorithm,
        model=model,
        image_shape=spec.image_shape,
        classes=10,
        mean=spec.mean,
        std=spec.std,
        lr=None if steps is None else lr,
        momentum=momentum,
        proximal_mu=proximal_mu,
        local_steps=steps,
        batch_size=batch,
        num_examples=len(images),
        defenses=tuple(chain.public()),
    )
    seen = Observation(
        round=1,
        client=client,
        parameters=sent,
        buffers=buffers,
        update=protected,
        declaration=declaration,
        returned_buffers=result.buffers if buffers_return else {},
    )
    return Captured(seen, images[result.used], labels[result.used], held)


def residual(captured: Captured, unknowns: Tensors, *, trials: int = 1) -> float:
    """Relative distance between the capture and the attacker's simulation at the truth."""
    case = open_case(captured.seen, tier="adaptive", max_images=8, unroll=16)
    problem = Problem.stack(
        [(case, trial) for trial in range(trials)], seed=0, device=torch.device("cpu")
    ).to(torch.float64)

    def trial(value: Tensor) -> Tensor:
        return value.to(torch.float64).expand(trials, *value.shape)

    rows = torch.nn.functional.one_hot(captured.labels, 10)
    simulated = problem.simulate(
        trial(captured.images),
        trial(rows),
        {name: trial(value) for name, value in unknowns.items()},
    )
    names = captured.seen.parameters
    wrong = sum(float((simulated[n] - problem.target[n]).square().sum()) for n in names)
    whole = sum(float(problem.target[n].square().sum()) for n in names)
    return math.sqrt(wrong / whole)
