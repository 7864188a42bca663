"""Uploads of clients that hold smooth signals."""

from __future__ import annotations

import torch
from torch import Tensor

from bract import Observation
from bract.config import SignalSchema
from bract.models import create_model
from bract.models.losses import loss_of
from bract.schema import ClientDeclaration


def signal_upload(
    name: str,
    schema: SignalSchema,
    count: int = 1,
    *,
    classes: int = 4,
    activation: str = "sigmoid",
) -> tuple[Observation, Tensor, Tensor]:
    """The gradient of one batch of sines, the signals in [0, 1], and their labels."""
    outputs = schema.outputs or classes
    torch.manual_seed(0)
    model = create_model(
        name,
        classes=outputs,
        channels=schema.channels,
        image_size=1,
        activation=activation,
        signal=schema,
    )
    time = torch.linspace(0.0, 6.0, schema.length)
    signals = 0.5 + 0.4 * torch.sin(time + 6 * torch.rand(count, schema.channels, 1, 1))
    mean, std = schema.feature_moments()
    declaration = ClientDeclaration(
        algorithm="fedsgd",
        model=name,
        activation=activation,
        input="signal",
        image_shape=schema.shape,
        classes=outputs,
        mean=mean,
        std=std,
        signal=schema,
        loss=schema.objective,
        batch_size=count,
        num_examples=count,
    )
    inputs = (signals - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    labels = torch.arange(count) % classes
    if schema.task == "forecast":
        labels = torch.rand(count) if outputs == 1 else torch.rand(count, outputs)
    loss = loss_of(schema.objective).mean(model(inputs), labels)
    names, values = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, values)
    observation = Observation(
        round=1,
        client="client-0",
        declaration=declaration,
        parameters={n: v.detach() for n, v in model.named_parameters()},
        buffers={},
        update=dict(zip(names, gradients, strict=True)),
    )
    return observation, signals, labels
