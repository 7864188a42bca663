"""One client's work in one round: local training or one batch's gradient, as an update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.client.augmentation import augment
from bract.client.steps import Steps
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.errors import BractError
from bract.models.dropout import seed_dropout
from bract.models.keylock import trainable_parameters
from bract.models.losses import loss_of as objective_of
from bract.models.own_loss import auxiliary_loss
from bract.seeds import derive_seed
from bract.updates.update import Tensors, buffers_of, parameters_of


@dataclass(frozen=True)
class LocalResult:
    """What local training produced.

    Attributes
    ----------
    update
        See `bract.updates.update`; CPU tensors by parameter name.
    buffers
        The model's buffers afterwards.
    loss
        Mean training loss over the steps, without a proximal or auxiliary term.
    accuracy
        Mean training accuracy over the examples as they were used, in [0, 1].
    steps
        Optimizer steps taken (1 for a gradient).
    used
        Indices of the distinct examples used, in order of first use.
    augmented
        The images of ``used`` as they were first trained on, ``(len(used), C, H, W)`` in [0, 1];
        None where nothing was done to them.
    examples
        How many examples there were to draw from, where ``used`` is a secret; None elsewhere.
    """

    update: Tensors
    buffers: Tensors
    loss: float
    accuracy: float
    steps: int
    used: list[int]
    augmented: Tensor | None = None
    examples: int | None = None

    @property
    def num_examples(self) -> int:
        """Examples by which the client weighs."""
        return len(self.used) if self.examples is None else self.examples

    def trained_on(self, images: Tensor, most: int | None = None) -> Tensor:
        """Return the images of ``used``, or the first ``most``, as they were first trained on.

        Parameters
        ----------
        images
            All images of the client, as `train_locally` took them.
        """
        return images[self.used[:most]] if self.augmented is None else self.augmented[:most]


def train_locally(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    config: TrainingConfig,
    spec: DataSpec,
    seed: int,
    device: torch.device,
    proximal_mu: float = 0.0,
) -> LocalResult:
    """Train ``model`` in place and return the update.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, N >= 1; of tokens ``(N, T)``.
    seed
        Decides the order of the examples, and what augmentation and dropout draw. It is the
        federation's, which the server knows, and no defense rests on it. What must stay secret
        (noise, keys) comes from `ProtectContext.stream`.
    config
        Of the round: `TrainingConfig.at`.
    proximal_mu
        FedProx's mu: adds ``mu / 2 * ||w - w_received||^2`` over the parameters to the loss
        (Li et al. 2020). It acts on local training only, not on the gradient of ``fedsgd``,
        where ``w`` is what was received.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.Generator().manual_seed(derive_seed(seed, "augmentation"))
    seed_dropout(model, torch.Generator().manual_seed(derive_seed(seed, "dropout")))
    model.to(device).train()
    before = parameters_of(model)
    batches = _batches(len(images), config, generator)
    used: dict[int, Tensor | None] = {}
    losses: list[float] = []
    objective = objective_of(spec.loss)
    correct, seen = 0.0, 0

    def loss_of(batch: list[int]) -> Tensor:
        nonlocal correct, seen
        inputs = images[batch]
        if config.augmentation:
            inputs = augment(inputs, config.augmentation, draws)
        for position, index in enumerate(batch):
            used.setdefault(index, inputs[position] if config.augmentation else None)
        try:
            logits = model(spec.normalise(inputs.to(device)))
        except ValueError as error:
            raise _of_one_image(error, batch, len(images), config) from error
        target = labels[batch].to(device)
        loss = objective.mean(logits, target)
        losses.append(float(loss.detach()))
        correct += float(objective.right(logits, target).sum())
        seen += len(batch)
        return loss + auxiliary_loss(model)

    if config.algorithm == "fedsgd":
        names = [name for name, _ in model.named_parameters()]
        trained = trainable_parameters(model)
        gradients = torch.autograd.grad(loss_of(next(batches)), trained)
        update = {n: g.detach().cpu() for n, g in zip(names, gradients[: len(names)], strict=True)}
        _step_private(trained[len(names) :], gradients[len(names) :], config.lr)
    else:
        optimizer = Steps(trainable_parameters(model), config)
        received = [p.detach().clone() for p in model.parameters()] if proximal_mu > 0.0 else []
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(batch)
            if received:
                loss = loss + proximal_mu / 2 * _squared_distance(model, received)
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()  # of a large model the gradients are as much memory
        update = _taken_off(before, model)
    return LocalResult(
        update=update,
        buffers=buffers_of(model),
        loss=sum(losses) / len(losses),
        accuracy=correct / seen,
        steps=len(losses),
        used=list(used),
        augmented=torch.stack([i for i in used.values() if i is not None])
        if config.augmentation
        else None,
    )


def planned_steps(config: TrainingConfig, count: int) -> int:
    """Return how many optimizer steps `train_locally` takes on ``count`` examples."""
    if config.algorithm == "fedsgd":
        return 1
    if config.local_steps is None:
        return config.local_epochs * math.ceil(count / config.batch_size)
    # Never more than `local_steps` passes, each of one step at least.
    return config.local_steps


def planned_passes(config: TrainingConfig, count: int) -> tuple[int, int]:
    """Return how many passes over ``count`` examples `train_locally` ends, and how many it begins.

    With per-example noise each example is drawn by chance: these are passes as expected.
    """
    each, steps = math.ceil(count / config.batch_size), planned_steps(config, count)
    return steps // each, math.ceil(steps / each)


def planned_examples(config: TrainingConfig, count: int) -> int:
    """Return how many distinct ones of ``count`` examples `train_locally` trains on.

    With per-example noise, of which each step draws a sample, it is no more than these as expected.
    """
    return min(count, planned_steps(config, count) * config.batch_size)


def smallest_batch(config: TrainingConfig, count: int) -> int:
    """Return the size of the smallest batch of those that ``count`` examples are trained in."""
    full = count // config.batch_size
    left = count % config.batch_size
    reached = planned_steps(config, count) > full
    return left if left and reached else config.batch_size


def _of_one_image(
    error: ValueError, batch: list[int], count: int, config: TrainingConfig
) -> Exception:
    """Return the error for batch normalisation that had one value; other errors unchanged."""
    if len(batch) > 1 or "more than 1 value per channel" not in str(error):
        return error
    return BractError(
        f"a batch of one image (training.batch_size {config.batch_size}, {count} images here) "
        "leaves a batch normalisation of the model one value a channel, which has no variance; "
        "choose a batch size that leaves no single image, larger images or another model",
        code="config-conflict",
    )


@torch.no_grad()
def _taken_off(before: Tensors, model: nn.Module) -> Tensors:
    """Return `difference` of ``before`` and the parameters, in the memory of ``before``."""
    for name, parameter in model.named_parameters():
        before[name].sub_(parameter.cpu())
    return before


@torch.no_grad()
def _step_private(parameters: list[nn.Parameter], gradients: Sequence[Tensor], lr: float) -> None:
    """Train what the server never sees, which it therefore cannot step."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.sub_(gradient, alpha=lr)


def _squared_distance(model: nn.Module, received: list[Tensor]) -> Tensor:
    parts = [(p - r).square().sum() for p, r in zip(model.parameters(), received, strict=True)]
    return torch.stack(parts).sum()


def _batches(count: int, config: TrainingConfig, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield batches epoch by epoch, until the configured number of steps or epochs is reached."""
    limit = config.local_steps if config.algorithm == "fedavg" else 1
    epochs = config.local_epochs if limit is None else limit
    done = 0
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).tolist()
        for start in range(0, count, config.batch_size):
            if limit is not None and done == limit:
                return
            yield order[start : start + config.batch_size]
            done += 1
