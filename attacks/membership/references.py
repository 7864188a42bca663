"""Reference models, which saw public data alone, and shadow models, which saw some candidates."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bract.captures.observation import ClientDeclaration
from bract.models.losses import Loss, loss_of
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors

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
        chosen = torch.randperm(len(inputs), generator=generator)[: training.examples]
        yield _trained(model, start, inputs, labels, chosen, training, generator)


def train_shadow(
    model: nn.Module,
    start: Tensors,
    inputs: Tensor,
    labels: Tensor,
    sites: Sequence[Tensor],
    training: Training,
    *,
    rounds: int,
    seed: int,
) -> Tensors:
    """Train one model as the federation trains, each site on its own records; return its state.

    Every round each site starts from the mean of the last round and takes its local steps, as many
    for a record as the clients declare; the mean goes by the number of records (FedAvg). Beyond
    `MOST_STEPS` in all, later rounds are left out.

    Parameters
    ----------
    model
        The architecture, in evaluation mode: batch normalisation keeps its statistics.
    start
        State that the first round begins with.
    inputs, labels
        Normalised candidates ``(N, ...)`` and int64 ``(N,)``.
    sites
        Positions of each site's records; a site without any takes no part.
    training
        Of one client in one round.
    """
    generator = torch.Generator().manual_seed(seed)
    present = [site for site in sites if len(site)]
    each = [
        replace(training, steps=max(1, round(training.steps * len(site) / training.examples)))
        for site in present
    ]
    total = sum(len(site) for site in present)
    state = dict(start)
    for _ in range(max(1, min(rounds, MOST_STEPS // sum(one.steps for one in each)))):
        begun = dict(state)
        for position, (site, own) in enumerate(zip(present, each, strict=True)):
            found = _trained(model, begun, inputs, labels, site, own, generator)
            share = len(site) / total
            for name, value in found.items():
                if value.is_floating_point():
                    state[name] = value * share + (state[name] if position else 0.0)
    return state


def _trained(
    model: nn.Module,
    start: Tensors,
    inputs: Tensor,
    labels: Tensor,
    chosen: Tensor,
    training: Training,
    generator: torch.Generator,
) -> Tensors:
    """Return the state after a training's steps on the chosen records."""
    own = copy.deepcopy(model)
    own.load_state_dict(start, strict=False)
    optimizer = _optimizer(own, training)
    for batch in _batches(chosen, training, generator):
        optimizer.zero_grad()
        training.loss.mean(own(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    held = own.state_dict()
    state = dict(own.named_parameters()) | dict(own.named_buffers())  # tied ones once
    return {name: value.detach() for name, value in state.items() if name in held}


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
