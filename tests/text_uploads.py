"""Uploads of clients that hold random texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bract import Observation
from bract.config.text import TextSchema
from bract.defenses.entries import prepare_model
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.losses import loss_of
from bract.schema import ClientDeclaration
from bract.updates.update import buffers_of, parameters_of

ENCODER = "text-encoder(width=64, depth=2, heads=2)"
DECODER = "text-decoder(width=64, depth=2, heads=2)"

SCHEMA = TextSchema(vocabulary=120, length=10, special=(0, 1, 2))
START, END = 1, 2


def texts(count: int, *, seed: int, schema: TextSchema = SCHEMA) -> Tensor:
    """Random texts of different lengths, int64 ``(count, length)``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((count, schema.length), schema.padding)
    for row in rows:
        length = int(torch.randint(5, schema.length + 1, (1,), generator=generator))
        row[:length] = torch.randint(3, schema.vocabulary, (length,), generator=generator)
        row[0], row[length - 1] = START, END
    return rows


def upload(
    name: str,
    ids: Tensor,
    *,
    schema: TextSchema = SCHEMA,
    classes: int = 3,
    steps: int = 0,
    defenses: tuple[dict[str, Any], ...] = (),
) -> Observation:
    """The gradient of one batch, after ``steps`` of training on another."""
    shape = (schema.length, 1, 1)
    model: Any = create_model(
        name, classes=classes, channels=schema.length, image_size=1, text=schema
    )
    prepare_model(model, defenses)
    initialise(model, "default", 3)
    model.eval()
    objective = loss_of(schema.objective)
    labels = torch.arange(len(ids)) % classes
    target = labels.float() if schema.task == "language-model" else labels

    def loss(batch: Tensor) -> Tensor:
        return objective.mean(model(batch), target[: len(batch)])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss(texts(len(ids), seed=100 + step, schema=schema)).backward()
        optimizer.step()
    model.zero_grad()
    sent, buffers = parameters_of(model), buffers_of(model)
    loss(ids).backward()
    mean, std = schema.feature_moments()
    return Observation(
        round=1,
        client="a",
        parameters=sent,
        buffers=buffers,
        returned_buffers={},
        update={n: p.grad.clone() for n, p in model.named_parameters()},
        declaration=ClientDeclaration(
            algorithm="fedsgd",
            model=name,
            input="text",
            image_shape=shape,
            classes=classes,
            mean=mean,
            std=std,
            text=schema,
            loss=schema.objective,
            defenses=defenses,
            local_steps=1,
            batch_size=len(ids),
            num_examples=len(ids),
            norm_mode="eval",
        ),
    )
