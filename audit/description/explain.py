"""Whether the described local training explains the size of what the clients sent.

A client of the described app is simulated on made-up images: smooth noise. Its update has the
layers, the sizes and the optimizer's marks of a real one, not its content. Labels at random make
steps that partly cancel each other, images of one class steps that add up; real clients are in
between, and smaller where the model has already learnt their data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks.problem.step_rules import StepSettings
from bract.attacks.problem.target_model import declared_loss
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.models.losses import drawn_labels
from bract.updates.momentum import mean_velocity
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors

Labels = Literal["mixed", "alike"]

LABELS: tuple[Labels, ...] = ("mixed", "alike")
"""Labels of the simulated images: drawn at random, or one for all."""

OPTIMIZERS = ("sgd", "adam")
"""Optimizers that are simulated, and that an update is attributed to."""

MOST_STEPS = 8
"""Steps that are simulated; of longer training the rest is taken to go on alike."""

MOST_IMAGES = 64
"""Images a step that are simulated."""

_SLACK = 1.0 + 1e-4


@dataclass(frozen=True)
class Explained:
    """How a simulated client's update compares with what was captured.

    Attributes
    ----------
    factor
        Captured size over simulated size, the median over tensors.
    spread
        By what factor single tensors stray from that, the median over tensors; 1 where all agree.
    """

    factor: float
    spread: float


def explain(
    model: nn.Module,
    observation: Observation,
    declaration: ClientDeclaration,
    *,
    labels: Labels = "mixed",
) -> Explained:
    """Compare an observation with a simulated client of its declaration.

    Parameters
    ----------
    model
        As the clients train it; it is left as it is.
    declaration
        With ``image_shape``, ``classes`` and ``lr``; local steps, batch size and optimizer where
        they are known.
    """
    simulated = simulate(model, observation, declaration, labels=labels).update
    logs = []
    for name, value in simulated.items():
        own, theirs = _size(value), _size(observation.update[name])
        if own > 0.0 and theirs > 0.0:
            logs.append(math.log(theirs / own))
    if not logs or not all(map(math.isfinite, logs)):
        raise BractError(
            f"{observation.key}: a simulated client's update cannot be compared with the captured "
            "one (zero or not finite); check the learning rate",
            code="declaration-wrong",
        )
    middle = median(logs)
    return Explained(math.exp(middle), math.exp(median(abs(log - middle) for log in logs)))


@dataclass(frozen=True)
class Simulated:
    """The update of a made-up client, and the labels that it learnt.

    Attributes
    ----------
    update
        By parameter name, float32.
    labels
        int64, of every example of every step that was simulated.
    """

    update: Tensors
    labels: Tensor


def is_as_initialised(model: nn.Module, observation: Observation) -> bool:
    """Return whether what was sent is within PyTorch's own initialisation, so no training came
    before.

    Weights and biases of linear and convolutional layers begin within ``1 / sqrt(fan in)``; a few
    rounds lead some of them out.
    """
    found = False
    for name, module in model.named_modules():
        weight = observation.parameters.get(f"{name}.weight" if name else "weight")
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and weight is not None:
            found = True
            if float(weight.abs().max()) > _SLACK / math.sqrt(max(1, weight[0].numel())):
                return False
    return found


def simulate(
    model: nn.Module,
    observation: Observation,
    declaration: ClientDeclaration,
    *,
    labels: Labels = "mixed",
    seed: int = 0,
    brightness: float = 1.0,
) -> Simulated:
    """Train a simulated client of ``declaration``; return its update and its labels.

    Parameters
    ----------
    brightness
        Factor in [0, 1] on its images.
    """
    p = declaration
    if p.image_shape is None or p.classes is None:
        raise AssertionError("the caller knows the input and the classes")
    client = copy.deepcopy(model).float()
    state = {**observation.parameters, **observation.buffers}
    client.load_state_dict({n: state[n] for n in client.state_dict() if n in state}, strict=False)
    client.train(p.norm_mode == "train")
    before = {name: value.detach().clone() for name, value in client.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    steps = StepLaw.of(p).counted
    taken = min(steps, MOST_STEPS)
    images = min(p.batch_size or p.num_examples or 1, MOST_IMAGES)
    if images == 1 and any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in client.modules()
    ):
        client.eval()
    moving = {name: value for name, value in client.named_parameters() if value.requires_grad}
    rule = StepSettings(optimizer="adam" if p.optimizer == "adam" else "sgd", momentum=p.momentum)
    direction, objective = rule.rule(), declared_loss(p)
    learnt = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in range(taken):
            inputs = _normalised(brightness * _examples(images, p, generator), p)
            drawn = drawn_labels(
                objective,
                (images,),
                outputs=p.classes,
                tokens=p.image_shape[0],
                generator=generator,
            )
            wanted = drawn if labels == "mixed" else torch.zeros_like(drawn)
            learnt.append(wanted)
            loss = objective.mean(client(inputs), wanted)
            slopes = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
            with torch.no_grad():
                gradients = {
                    name: slope + p.weight_decay * value
                    for (name, value), slope in zip(moving.items(), slopes, strict=True)
                    if slope is not None
                }
                for name, step in direction(gradients).items():
                    moving[name].sub_(step, alpha=p.lr or 0.0)
    momentum = p.momentum if p.optimizer == "sgd" else 0.0
    led, simulated = (k * mean_velocity(momentum, k) for k in (steps, taken))
    scale = led / simulated
    update = {
        name: (before[name] - value.detach()) * scale
        for name, value in client.named_parameters()
        if value.requires_grad and name in observation.update
    }
    return Simulated(update, torch.cat(learnt))


def likeliest_optimizer(found: Mapping[str, Sequence[Explained]]) -> tuple[str, float]:
    """Return the optimizer whose simulated updates stray least, and by how much less in factors."""
    strayed = {name: median(e.spread for e in results) for name, results in found.items()}
    best, second = sorted(strayed, key=lambda name: strayed[name])[:2]
    return best, strayed[second] / strayed[best]


def _examples(count: int, p: ClientDeclaration, generator: torch.Generator) -> Tensor:
    """Return smooth noise, or texts of tokens drawn at random."""
    assert p.image_shape is not None
    if p.text is None:
        return _pictures(count, p.image_shape, generator)
    return torch.rand(count, *p.image_shape, generator=generator)


def _pictures(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Return smooth noise ``(count, C, H, W)`` in [0, 1]."""
    channels, height, width = shape
    coarse = torch.rand(count, channels, 4, 4, generator=generator)
    return F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)


def _normalised(images: Tensor, p: ClientDeclaration) -> Tensor:
    channels = images.shape[1]
    mean = torch.tensor(p.mean or (0.0,) * channels).view(-1, 1, 1)
    std = torch.tensor(p.std or (1.0,) * channels).view(-1, 1, 1)
    return (images - mean) / std


def _size(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt())
