"""Observations computed in memory, from embedded digits and small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bract.config import DataConfig
from bract.data import test_data as load_test_data
from bract.models import create_model, initialise
from bract.observation import Observation, Protocol
from bract.update import Tensors, buffers_of, difference, parameters_of

Make = Callable[..., Observation]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    return load_test_data(DataConfig(name="digits", image_size=16))


@pytest.fixture(scope="session")
def tiny() -> tuple[Tensor, Tensor]:
    return load_test_data(DataConfig(name="digits", image_size=8))


@pytest.fixture
def observe() -> Make:
    """Make observations; see `_observe`."""
    return _observe


def _observe(
    images: Tensor,
    labels: Tensor,
    *,
    model: str | nn.Module = "lenet-strided",
    init: str = "default",
    classes: int = 10,
    client: str = "client-0",
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float = 0.5,
    momentum: float = 0.0,
    **declared: Any,
) -> Observation:
    """What a client that holds these images would upload: a gradient, or K steps of SGD."""
    channels, size, _ = images.shape[1:]
    network = (
        initialise(
            create_model(model, classes=classes, channels=channels, image_size=size), init, 0
        )
        if isinstance(model, str)
        else model
    )
    mean, std = (0.3,) * channels, (0.4,) * channels
    inputs = (images - 0.3) / 0.4
    sent, buffers = parameters_of(network), buffers_of(network)
    batch = batch_size or len(images)
    protocol = Protocol(
        model=model if isinstance(model, str) else None,
        image_shape=(channels, size, size),
        classes=classes,
        mean=mean,
        std=std,
        batch_size=batch,
        num_examples=len(images),
    )
    update: Tensors
    if steps is None:
        loss = nn.functional.cross_entropy(network(inputs), labels)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        update = {n: g for (n, _), g in zip(network.named_parameters(), gradients, strict=True)}
        protocol = replace(protocol, algorithm="fedsgd")
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)
        epoch = [slice(at, at + batch) for at in range(0, len(images), batch)]
        for step in range(steps):
            taken = epoch[step % len(epoch)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs[taken]), labels[taken]).backward()
            optimizer.step()
        update = difference(sent, parameters_of(network))
        protocol = replace(
            protocol, algorithm="fedavg", lr=lr, momentum=momentum, local_steps=steps
        )
    return Observation(
        round=1,
        client=client,
        parameters=sent,
        buffers=buffers,
        update=update,
        protocol=replace(protocol, **declared),
    )
