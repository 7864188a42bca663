"""How a client's optimizer turns a gradient into the direction of a step, differentiably."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from bract.updates.update import Tensors

BETAS, EPS = (0.9, 0.999), 1e-8
"""Decay of both moments, and the term that keeps the division finite: PyTorch's for Adam."""

ALPHA = 0.99
"""Share of the mean square that RMSprop keeps, as in torch."""

_SMOOTHING = 0.01
"""Mean square of a tensor, as a share, that the derivatives of Adam and RMSprop have under the
root; as the adaptive attacker on AdaDefense, whose map is Adam's."""

StepRule = Callable[[Tensors], Tensors]
"""Take one step's gradients, ``(L, ...)`` by name, and return what the learning rate multiplies.

It holds the moments of the steps before, so that every training takes a new one."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The declared settings by which an optimizer turns gradients into steps.

    Attributes
    ----------
    optimizer
        One of `RULES`.
    momentum, momenta
        Momentum of SGD and RMSprop, and what takes its place at each step, as of a cycle; of Adam
        ``momenta`` are the first of the betas. Empty where no step has its own.
    betas, eps
        Of Adam, and ``eps`` of RMSprop; None: torch's own.
    amsgrad
        Whether Adam divides by the largest second moment so far (Reddi et al. 2018).
    """

    optimizer: str = "sgd"
    momentum: float = 0.0
    momenta: tuple[float, ...] = ()
    betas: tuple[float, float] | None = None
    eps: float | None = None
    amsgrad: bool = False

    def rule(self) -> StepRule:
        """Return the rule of one training, which holds its moments."""
        return RULES[self.optimizer](self)

    def at(self, step: int, usual: float) -> float:
        """Return the momentum, or first beta, of a step from 0."""
        return self.momenta[step] if step < len(self.momenta) else usual


def sgd(settings: StepSettings) -> StepRule:
    """Return SGD: the gradient, or the velocity ``u <- momentum u + g``.

    As in torch, a step without momentum neither uses nor changes the velocity.
    """
    velocity: Tensors = {}
    steps = count()

    def direction(gradients: Tensors) -> Tensors:
        nonlocal velocity
        momentum = settings.at(next(steps), settings.momentum)
        if not momentum:
            return gradients
        velocity |= {
            n: momentum * velocity[n] + g if n in velocity else g for n, g in gradients.items()
        }
        return {n: velocity[n] for n in gradients}

    return direction


def nesterov(settings: StepSettings) -> StepRule:
    """Return SGD with Nesterov's momentum, as torch has it: ``g + momentum u`` of that velocity."""
    velocity, steps = sgd(settings), count()

    def direction(gradients: Tensors) -> Tensors:
        ahead, momentum = velocity(gradients), settings.at(next(steps), settings.momentum)
        return {n: g + momentum * ahead[n] for n, g in gradients.items()}

    return direction


def adam(settings: StepSettings) -> StepRule:
    """Return Adam (Kingma and Ba 2015, algorithm 1): ``m^ / (sqrt(v^) + eps)``.

    The first step is a sign, whose derivative is zero but for gradients near zero, where it is
    huge. So values are Adam's, and derivatives those with a small share of the tensor's mean square
    added under the root. With ``amsgrad`` v is the largest one so far, as torch has it: before the
    correction of its bias.
    """
    usual, beta2 = settings.betas or BETAS
    eps = EPS if settings.eps is None else settings.eps
    first: Tensors = {}
    second: Tensors = {}
    largest: Tensors = {}
    steps = 0

    def direction(gradients: Tensors) -> Tensors:
        nonlocal first, second, largest, steps
        beta1 = settings.at(steps, usual)
        steps += 1
        first = {n: _mean(beta1, first.get(n), g) for n, g in gradients.items()}
        second = {n: _mean(beta2, second.get(n), g.square()) for n, g in gradients.items()}
        largest = (
            {n: torch.maximum(largest.get(n, v), v) for n, v in second.items()}
            if settings.amsgrad
            else second
        )
        return {
            n: _normalised(first[n] / (1.0 - beta1**steps), largest[n] / (1.0 - beta2**steps), eps)
            for n in gradients
        }

    return direction


def rmsprop(settings: StepSettings) -> StepRule:
    """Return RMSprop (Tieleman and Hinton 2012), as torch has it: ``g / (sqrt(v) + eps)``.

    With momentum it is the velocity of these directions. The first step is a sign, whose derivative
    is taken as Adam's is.
    """
    velocity = sgd(settings)
    eps = EPS if settings.eps is None else settings.eps
    second: Tensors = {}

    def direction(gradients: Tensors) -> Tensors:
        nonlocal second
        kept = {n: second.get(n, g.new_zeros(())) for n, g in gradients.items()}
        second = {n: _mean(ALPHA, kept[n], g.square()) for n, g in gradients.items()}
        return velocity({n: _normalised(g, second[n], eps) for n, g in gradients.items()})

    return direction


RULES: dict[str, Callable[[StepSettings], StepRule]] = {
    "sgd": sgd,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adam,
    "rmsprop": rmsprop,
}
"""Optimizers that are simulated, by the name that is declared."""


def is_decoupled(optimizer: str) -> bool:
    """Return whether weight decay is added to the direction, as AdamW does, and not to the
    gradient.
    """
    return optimizer == "adamw"


def mean_step(optimizer: str, steps: int) -> float:
    """Return the mean length of the steps of a rule that normalises, under an even gradient.

    As a multiple of the learning rate: 1 of Adam; RMSprop, which corrects no bias, begins with
    ``1 / sqrt(1 - alpha) = 10``.
    """
    if optimizer != "rmsprop":
        return 1.0
    return sum(1.0 / math.sqrt(1.0 - ALPHA**k) for k in range(1, steps + 1)) / steps


def _mean(beta: float, before: Tensor | None, value: Tensor) -> Tensor:
    return (1.0 - beta) * value if before is None else beta * before + (1.0 - beta) * value


def _normalised(first: Tensor, second: Tensor, eps: float) -> Tensor:
    exact = first / (second.clamp_min(1e-38).sqrt() + eps)
    if not first.requires_grad:
        return exact
    size = second.detach().flatten(1).mean(dim=1).clamp_min(1e-30)
    under = second + _SMOOTHING * size.view(-1, *[1] * (second.dim() - 1))
    smooth = first / (under.sqrt() + eps)
    return exact.detach() + smooth - smooth.detach()
