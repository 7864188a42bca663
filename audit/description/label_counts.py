"""Count the examples of each class that an upload implies: whole numbers, where all else is right.

Under softmax and cross entropy the last bias' gradient is ``p - n / N``: ``p`` the model's mean
probabilities, ``n`` the examples of each class, ``N`` all of them. A model as it was initialised
has nearly the same ``p`` on any input, so made-up images give it, and the upload then gives ``n``.
What is no whole number comes of another learning rate, momentum, sign, loss or weights of classes.
The same identity serves attacks that count labels (Geng et al. 2021; Yin et al., GradInversion).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from bract.attacks.problem.target_model import target_model_of
from bract.audit.description.explain import MOST_IMAGES, MOST_STEPS, is_as_initialised, simulate
from bract.audit.description.noise import unit_of
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.models.losses import loss_of
from bract.updates.step_law import StepLaw

RANDOM = 0.25
"""Mean distance to the nearest whole number, of numbers drawn at random."""

APART = RANDOM / 2
"""Mean distance from which on counts are no whole numbers."""

UNSURE = 2.0
"""Real images may differ from made-up ones by as often what made-up ones differ by."""

BRIGHTNESS = (1.0, 0.5, 0.25, 0.0)
"""Factors on the made-up images, of which one is black."""

RATES = 400
"""Learning rates that are tried between two bounds."""


@dataclass(frozen=True)
class LabelCounts:
    """The counts of classes that an upload implies, as a function of the learning rate.

    Attributes
    ----------
    examples
        ``N`` of one pass.
    probabilities
        Mean probabilities ``(classes,)`` over the client's steps, of made-up images.
    moved
        Update of the last bias ``(classes,)``, over the number of steps and the momentum's gain.
    unsure
        By how much counts differ between made-up images and by rounding, in examples, the mean
        over classes.
    """

    examples: int
    probabilities: Tensor
    moved: Tensor
    unsure: float

    def apart(self, lr: float) -> float:
        """Return the mean distance of the counts from whole numbers, none of them below zero."""
        counts = self.examples * (self.probabilities - self.moved / lr)
        return float((counts - counts.round().clamp(min=0.0)).abs().mean())

    def is_whole(self, lr: float) -> bool:
        """Return whether a learning rate gives whole numbers, as far as these are known."""
        return self.apart(lr) <= APART + UNSURE * self.unsure

    def fitting_rate(self, low: float, high: float) -> float | None:
        """Return the one learning rate between two bounds that gives whole numbers.

        None where rates give them that are more than a tenth apart: of few examples many do.
        """
        tried = np.geomspace(low, high, RATES)
        distances = np.array([self.apart(float(rate)) for rate in tried])
        best = float(distances.min())
        near = tried[distances <= 2.0 * best]
        if best > APART or near.max() > 1.1 * near.min():
            return None
        rate = float(tried[distances.argmin()])
        counts = (self.examples * (self.probabilities - self.moved / rate)).round().clamp(min=0.0)
        gradient = self.probabilities - counts / self.examples
        return float((self.moved * gradient).sum() / gradient.square().sum())


def last_bias(observation: Observation) -> str | None:
    """Return the name of the bias ``(classes,)`` that a softmax follows; None where none is sure.

    Only where the model ends with a matrix and its bias is it sure that nothing is behind them.
    """
    p, names = observation.declaration, list(observation.parameters)
    if not loss_of(p.loss).of_classes or not p.classes or p.classes < 2 or len(names) < 2:
        return None
    weight, bias = names[-2:]
    if weight.rpartition(".")[0] != bias.rpartition(".")[0] or not bias.endswith("bias"):
        return None
    matrix, update = observation.parameters[weight], observation.update.get(bias)
    if matrix.dim() != 2 or len(matrix) != p.classes or observation.rounded:
        return None
    return bias if update is not None and len(update) == p.classes and bool(update.any()) else None


def label_counts(observation: Observation, model: nn.Module | None = None) -> LabelCounts | None:
    """Return what an upload implies of its labels; None where nothing shows it.

    Parameters
    ----------
    observation
        Of a client that takes steps of SGD; its declaration describes them.
    model
        As the client trains it; None builds the declared one.
    """
    p, law, bias = observation.declaration, observation.law, last_bias(observation)
    drawn = _examples(p)
    if bias is None or drawn is None or p.text is not None or p.table is not None:
        return None
    if p.image_shape is None or p.weight_decay or p.proximal_mu or not law.linear:
        return None
    if p.label_smoothing or p.class_weights or p.soft_targets or law.clipped or p.momenta:
        return None
    if law.averaging and not law.lr:
        return None
    try:
        target = target_model_of(observation).model if model is None else model
        if not is_as_initialised(target, observation):
            return None
        found = torch.stack(
            [_probabilities(target, observation, bias, seed) for seed in range(len(BRIGHTNESS))]
        )
    except (BractError, RuntimeError, ValueError):
        return None
    mean = found.mean(dim=0)
    rounded = unit_of(observation, bias) * law.counted / (rate_of(p) * _length(p))
    unsure = drawn * (float((found - mean).abs().mean(dim=1).max()) + rounded)
    if not unsure <= RANDOM:
        return None
    return LabelCounts(drawn, mean, observation.update[bias].double() / _length(p), unsure)


def _probabilities(model: nn.Module, observation: Observation, bias: str, seed: int) -> Tensor:
    """Return the mean probabilities ``(classes,)`` of a made-up client's steps, float64."""
    p = observation.declaration
    plain = replace(
        p,
        algorithm="fedavg",
        optimizer="sgd",
        momentum=0.0,
        lr=rate_of(p) * observation.law.gain,
        local_steps=observation.law.counted,
    )
    made = simulate(model, observation, plain, seed=seed, brightness=BRIGHTNESS[seed])
    classes = len(observation.update[bias])
    shares = torch.bincount(made.labels.flatten(), minlength=classes).double() / made.labels.numel()
    return made.update[bias].double() / (rate_of(p) * _length(p)) + shares


def rate_of(p: ClientDeclaration) -> float:
    """Return the learning rate by which `LabelCounts` are asked; 1 where a gradient was sent."""
    law = StepLaw.of(p)
    return float(law.lr or 1.0) if law.averaging else 1.0


def _length(p: ClientDeclaration) -> float:
    """Return how far a constant gradient leads, as a multiple of the learning rate."""
    law = StepLaw.of(p)
    return law.counted * law.gain


def _examples(p: ClientDeclaration) -> int | None:
    """Return the examples of one pass; None where batches are uneven, or steps too many."""
    law = StepLaw.of(p)
    if not law.steps:
        return None
    held, steps = p.num_examples, law.steps
    each = min((n for n in (p.batch_size, held) if n is not None), default=None)
    if each is None or steps > MOST_STEPS or each > MOST_IMAGES:
        return None
    if steps == 1 or held is None or (each * steps) % held or held % each:
        # Of a part of the examples, or of uneven batches, the last one is smaller.
        return each * steps if steps == 1 else None
    return held
