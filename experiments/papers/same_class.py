"""Federations whose clients hold one image each, all of one class, as GLAUS wants its victims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.client.defenses import ProtectContext, build_defenses
from bract.config import DataConfig
from bract.config.config import TrainingConfig
from bract.data import Source
from bract.data.sources import open_source
from bract.errors import BractError
from bract.updates.update import Tensors, flatten, parameters_of
from experiments.harness.data_folders import Split, open_by_path
from experiments.harness.uploads import network_for, plain_spec, trained_upload

CLASSES = 10


@dataclass(frozen=True)
class Federation:
    """One victim, the attacker and the others.

    Attributes
    ----------
    truth, label
        The victim's image, float32 ``(1, C, H, W)`` in [0, 1], and label, int64 ``(1,)``.
    parameters
        Of the network that all clients received.
    gradient
        The victim's before its defense, flat.
    sent
        What each client's defense let out, flat; the victim's first, the attacker's last.
    """

    truth: Tensor
    label: Tensor
    parameters: Tensors
    gradient: Tensor
    sent: list[Tensor]


def images_of_one_class(
    data: str, folder: Path, split: Split, victims: int, clients: int
) -> tuple[Source, list[list[int]]]:
    """Return a data set, and of each federation the images: the victim's first.

    Victims have the last images of the split, the others the last before them of their class; no
    image is used twice.

    Raises
    ------
    BractError
        If the data set is not there, has not ten classes, or too few images of one.
    """
    if data == "digits":
        source = open_source(DataConfig(name="digits"), split)
    else:
        source = open_by_path(data, folder, split)
    if source.classes != CLASSES:
        raise BractError(
            f"{data} has {source.classes} classes, {CLASSES} are needed", code="data-empty"
        )
    total = len(source.labels)
    free: dict[int, list[int]] = {}
    for index in range(total - victims):
        free.setdefault(int(source.labels[index]), []).append(index)
    taken = []
    for victim in range(total - victims, total):
        alike = free.get(int(source.labels[victim]), [])
        if len(alike) < clients - 1:
            raise BractError(
                f"{data} has too few images of class {int(source.labels[victim])} for {clients} "
                "clients; choose fewer clients or uploads",
                code="data-empty",
            )
        taken.append([victim, *(alike.pop() for _ in range(clients - 1))])
    return source, taken


def federation(
    source: Source,
    taken: Sequence[int],
    *,
    model: str,
    size: int,
    defenses: Sequence[Mapping[str, Any]],
    seed: int,
    secret: str,
) -> Federation:
    """Let every client take the gradient of its image and defend it, in its first round.

    Parameters
    ----------
    taken
        Numbers of the clients' images, grey ones of ``size`` pixels.
    seed
        Of the network, drawn from U(-0.5, 0.5).
    secret
        What the clients' private numbers are drawn from.
    """
    images = source.images(taken, channels=1, size=size)
    labels = source.labels[list(taken)]
    spec = plain_spec((1, size, size), CLASSES)
    network = network_for(spec, model, seed, init="uniform")
    sent, gradient = [], torch.empty(0)
    for client in range(len(taken)):
        chain = build_defenses([dict(entry) for entry in defenses])
        private = int.from_bytes(sha256(f"{secret} {client}".encode()).digest())
        one = trained_upload(
            network,
            images[client : client + 1],
            labels[client : client + 1],
            training=TrainingConfig(algorithm="fedsgd", batch_size=1),
            spec=spec,
            chain=chain,
            state={},
            context=ProtectContext(round=1, seed=private),
            seed=seed,
            client=f"client-{client}",
            model=model,
        )
        if client == 0:
            gradient = flatten(one.update)
        sent.append(flatten(one.captured.update))
    return Federation(images[:1], labels[:1], parameters_of(network), gradient, sent)
