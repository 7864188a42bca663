"""Reference models: what models look like that saw public data alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.models.losses import Loss, loss_of
from bract.protocol.observation import ClientDeclaration
from bract.protocol.step_law import StepLaw
from bract.protocol.update import Tensors

MOST_STEPS = 1500
"""Local steps of one reference model; more would take longer than all other attackers."""


@dataclass(frozen=True)
class Training:
    """How reference models are trained: as the clients declare that they do.

    Attributes
    ----------
    examples
        Public records of one model: as many as a client has.
    """

    loss: Loss
    lr: float
    momentum: float
    optimizer: str
    batch: int
    steps: int
    examples: int

    @classmethod
    def declared(cls, declaration: ClientDeclaration, rounds: int) -> Training:
        """Return the training of a client over so many rounds; what is not declared has a default.

        The defaults are those of the configuration: rate 0.1, batches of 8.
        """
        batch = declaration.batch_size or 8
        local = StepLaw.of(declaration).counted
        return cls(
            loss=loss_of(
                declaration.loss,
                smoothing=declaration.label_smoothing,
                class_weights=declaration.class_weights,
            ),
            lr=declaration.lr or 0.1,
            momentum=declaration.momentum,
            optimizer=declaration.optimizer,
            batch=batch,
            steps=min(MOST_STEPS, rounds * local),
            examples=declaration.num_examples or batch,
        )


def train_references(
    model: nn.Module,
    start: Tensors,
    inputs: Tensor,
    labels: Tensor,
    training: Training,
    *,
    count: int,
    seed: int,
) -> Iterator[Tensors]:
    """Train models on parts of public data, all from the first global model; yield their states.

    Parameters
    ----------
    model
        The architecture, in evaluation mode: batch normalisation keeps its statistics.
    start
        State that the first captured round began with.
    inputs, labels
        Normalised public records ``(N, ...)`` and int64 ``(N,)``; each model trains on
        ``training.examples`` of them, drawn anew.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        own = copy.deepcopy(model)
        own.load_state_dict(start, strict=False)
        chosen = torch.randperm(len(inputs), generator=generator)[: training.examples]
        optimizer = _optimizer(own, training)
        for batch in _batches(chosen, training, generator):
            optimizer.zero_grad()
            training.loss.mean(own(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        held = own.state_dict()
        state = dict(own.named_parameters()) | dict(own.named_buffers())  # tied ones once
        yield {name: value.detach() for name, value in state.items() if name in held}


def _optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    if training.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=training.lr)
    return torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)


def _batches(chosen: Tensor, training: Training, generator: torch.Generator) -> Iterator[Tensor]:
    done = 0
    while done < training.steps:
        order = chosen[torch.randperm(len(chosen), generator=generator)]
        for batch in order.split(training.batch):
            if done == training.steps:
                return
            yield batch
            done += 1
