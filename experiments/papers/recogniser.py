"""Who names reconstructions: a network that was trained on other images of the data set."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from bract.models import create_model
from bract.models.initialise import initialise
from experiments.harness import mnist_package
from experiments.harness.data_folders import open_by_path
from experiments.harness.images import SIZE, training_images

_SEED = 5000
"""Of the network and of the order of its batches; no attacked network has it."""

_MOST = 50_000
"""Images of a data set by path that are held in memory."""


class Recogniser(BaseModel):
    """A network and its training with Adam.

    Attributes
    ----------
    model, activation
        Of the zoo.
    lr, steps, batch
        Learning rate, number of batches, and images of one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    lr: Annotated[float, Field(gt=0.0)] = 2e-3
    steps: Annotated[int, Field(ge=1)] = 1500
    batch: Annotated[int, Field(ge=2)] = 64


def named(
    recogniser: Recogniser,
    images: Tensor,
    *,
    data: str,
    classes: int,
    folder: Path,
    device: str = "cpu",
) -> list[list[int]]:
    """Return the classes of images, most likely first, by a network trained on a data set.

    Parameters
    ----------
    images
        float32 ``(N, C, size, size)`` in [0, 1], of the data set's colours.
    data, folder
        Name of a data set with classes, and where it lies if no package brings it; its training
        split is used.

    Raises
    ------
    BractError
        If the data set is not there or has no classes, or the model is unknown or refuses the size.
    """
    size = images.shape[-1]
    model = _trained(recogniser, data, classes, size, folder, device)
    with torch.no_grad():
        order = model(images.to(device)).argsort(dim=1, descending=True)
    return [[int(k) for k in row] for row in order]


@cache
def _trained(
    recogniser: Recogniser, data: str, classes: int, size: int, folder: Path, device: str
) -> nn.Module:
    images, labels = _training(data, size, folder)
    model = create_model(
        recogniser.model,
        classes=classes,
        channels=images.shape[1],
        image_size=size,
        activation=recogniser.activation,
    )
    initialise(model, "default", _SEED)
    if recogniser.activation == "relu":
        _he(model)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=recogniser.lr)
    order = torch.Generator().manual_seed(_SEED)
    for _ in range(recogniser.steps):
        batch = torch.randint(len(images), (recogniser.batch,), generator=order)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch].to(device)), labels[batch].to(device)).backward()
        optimizer.step()
    return model.eval()


def _he(model: nn.Module) -> None:
    """Draw weights as He et al. 2015: thirteen layers of ReLU do not learn from PyTorch's own."""
    order = torch.Generator().manual_seed(_SEED)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=order)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _training(data: str, size: int, folder: Path) -> tuple[Tensor, Tensor]:
    if data == "digits" or (data == "mnist" and mnist_package.available()):
        images, labels = training_images(data)
        if size == SIZE:
            return images, labels
        shape = (size, size)
        return F.interpolate(images, shape, mode="bilinear", antialias=True).clamp(0, 1), labels
    source = open_by_path(data, folder, "train")
    order = torch.Generator().manual_seed(_SEED)
    chosen = torch.randperm(len(source.labels), generator=order)[:_MOST]
    images = source.images(chosen.tolist(), channels=source.channels, size=size)
    return images, source.labels[chosen]
