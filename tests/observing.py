"""Observations computed in memory, from embedded digits and small models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bract import Observation
from bract.config import DataConfig
from bract.data.views import DataSpec
from bract.data.views import test_data as load_test_data
from bract.inputs import Truth
from bract.models import create_model
from bract.models.initialise import initialise
from bract.process import clock
from bract.schema import ClientDeclaration
from bract.scores import score_images
from bract.updates.update import Tensors, buffers_of, difference, parameters_of

Make = Callable[..., Observation]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ticking() -> Iterator[None]:
    """Let attacks look at a clock that goes on by a second whenever it is looked at."""
    seconds = itertools.count()
    with clock.timed_by(lambda: float(next(seconds))):
        yield


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    return load_test_data(DataConfig(name="digits", image_size=16))


@pytest.fixture(scope="session")
def tiny() -> tuple[Tensor, Tensor]:
    return load_test_data(DataConfig(name="digits", image_size=8))


@pytest.fixture
def observe() -> Make:
    """Make observations; see `observed`."""
    return observed


def observed(
    images: Tensor,
    labels: Tensor,
    *,
    model: str | nn.Module = "lenet-strided",
    name: str | None = None,
    init: str = "default",
    classes: int = 10,
    client: str = "client-0",
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float = 0.5,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    proximal_mu: float = 0.0,
    weight_decay: float = 0.0,
    normalised: bool = True,
    spec: DataSpec | None = None,
    returned: bool = False,
    **declared: Any,
) -> Observation:
    """What a client that holds these images would upload: a gradient, or K steps.

    The proximal term of the steps is declared as well.

    Parameters
    ----------
    name
        What the declaration calls a model that is given as a module.
    normalised
        Whether the client normalises its pixels, and declares it.
    spec
        How it does; None takes a mean of 0.3 and a deviation of 0.4.
    returned
        Whether it returns its buffers.
    """
    channels, size, _ = images.shape[1:]
    network = (
        initialise(
            create_model(model, classes=classes, channels=channels, image_size=size), init, 0
        )
        if isinstance(model, str)
        else model
    )
    spec = spec or DataSpec((channels, size, size), classes, (0.3,) * channels, (0.4,) * channels)
    inputs = spec.normalise(images) if normalised else images
    sent, buffers = parameters_of(network), buffers_of(network)
    batch = batch_size or len(images)
    declaration = ClientDeclaration(
        model=model if isinstance(model, str) else name,
        image_shape=(channels, size, size),
        classes=classes,
        mean=spec.mean if normalised else None,
        std=spec.std if normalised else None,
        batch_size=batch,
        num_examples=len(images),
    )
    update: Tensors
    if steps is None:
        loss = nn.functional.cross_entropy(network(inputs), labels)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        update = {n: g for (n, _), g in zip(network.named_parameters(), gradients, strict=True)}
        declaration = replace(declaration, algorithm="fedsgd")
    else:
        stepper: torch.optim.Optimizer = (
            torch.optim.Adam(network.parameters(), lr=lr, weight_decay=weight_decay)
            if optimizer == "adam"
            else torch.optim.SGD(
                network.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
            )
        )
        received = [p.detach().clone() for p in network.parameters()]
        epoch = [slice(at, at + batch) for at in range(0, len(images), batch)]
        for step in range(steps):
            taken = epoch[step % len(epoch)]
            stepper.zero_grad()
            nn.functional.cross_entropy(network(inputs[taken]), labels[taken]).backward()
            for parameter, start in zip(network.parameters(), received, strict=True):
                assert parameter.grad is not None
                parameter.grad += proximal_mu * (parameter.detach() - start)
            stepper.step()
        update = difference(sent, parameters_of(network))
        declaration = replace(
            declaration,
            algorithm="fedavg",
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            proximal_mu=proximal_mu or None,
            weight_decay=weight_decay,
            local_steps=steps,
        )
    return Observation(
        round=1,
        client=client,
        parameters=sent,
        buffers=buffers,
        returned_buffers=buffers_of(network) if returned else {},
        update=update,
        declaration=replace(declaration, **declared),
    )


def scores(images: Tensor, originals: Tensor) -> list[Any]:
    """Score reconstructions against their originals: `bract.schema.Scores` that lack no value."""
    truth = Truth(originals, torch.zeros(len(originals), dtype=torch.int64))
    return score_images(images, truth, perceptual=False).rows


def one_step(
    images: Any,
    labels: Any,
    *,
    steps: Any = 1,
    activation: Any = "sigmoid",
    model: Any = "lenet-strided-bn",
) -> Any:
    """What a client returns after one step of local training, its buffers among it."""
    size = images.shape[-1]
    torch.manual_seed(0)
    network = create_model(
        model, classes=10, channels=1, image_size=size, activation=activation
    ).train()
    return returning(network, model, images, labels, steps=steps, activation=activation)


def returning(
    network: nn.Module, name: str, images: Tensor, labels: Tensor, *, steps: int, **settings: Any
) -> Observation:
    """What a client of raw pixels returns, its buffers among it."""
    return observed(
        images,
        labels,
        **{"lr": 0.1, "normalised": False, "returned": True} | settings,
        model=network,
        name=name,
        steps=steps,
    )


Made = tuple[Observation, Tensor, Tensor]
OwnLoss = Callable[[Tensor, Tensor], Tensor]


def own_loop(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    loss: OwnLoss = nn.functional.cross_entropy,
    clip: float | None = None,
    count: int = 8,
    batch: int = 2,
    half: bool = False,
    lr: float = 0.1,
    name: str = "lenet-strided",
    epochs: int = 1,
) -> Made:
    """Train as an app of its own does, later epochs shuffled; declare plain SGD with ``lr``."""
    model: nn.Module = create_model(name, classes=10, channels=1, image_size=8, activation="relu")
    model = initialise(model, "default", 0)
    sent, buffers = parameters_of(model), buffers_of(model)
    digits = load_test_data(DataConfig(name="digits", image_size=8))
    images, labels = (part[:count] for part in digits)
    descent = optimizer(model.parameters())
    drawn = torch.Generator().manual_seed(7)
    later = [torch.randperm(count, generator=drawn) for _ in range(epochs - 1)]
    passes = [torch.arange(count), *later]
    for taken in [part for order in passes for part in order.split(batch)]:
        descent.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = model((images[taken] - 0.3) / 0.4)
        loss(outputs.float(), labels[taken]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        descent.step()
    declaration = ClientDeclaration(
        model=name,
        activation="relu",
        image_shape=(1, 8, 8),
        classes=10,
        mean=(0.3,),
        std=(0.4,),
        lr=lr,
        local_steps=epochs * -(-count // batch),
        batch_size=batch,
        num_examples=count,
    )
    update = difference(sent, parameters_of(model))
    return Observation(1, "client-0", sent, update, declaration, buffers=buffers), images, labels


def sgd(lr: float = 0.1, **terms: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **terms)
