"""How a client's optimizer turns a gradient into the direction of a step, differentiably."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bract.protocol.update import Tensors

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Of Adam, as clients and torch have them."""

_SMOOTHING = 0.01
"""Mean square of a tensor, as a share, that Adam's derivative has under the root; as the adaptive
attacker on AdaDefense, whose map is Adam's."""

StepRule = Callable[[Tensors], Tensors]
"""Take one step's gradients, ``(L, ...)`` by name, and return what the learning rate multiplies.

It holds the moments of the steps before, so that every training takes a new one."""


def sgd(momentum: float) -> StepRule:
    """Return SGD: the gradient, or the velocity ``u <- momentum u + g``."""
    velocity: Tensors = {}

    def direction(gradients: Tensors) -> Tensors:
        nonlocal velocity
        if not momentum:
            return gradients
        velocity = {n: momentum * velocity[n] + g if velocity else g for n, g in gradients.items()}
        return velocity

    return direction


def nesterov(momentum: float) -> StepRule:
    """Return SGD with Nesterov's momentum, as torch has it: ``g + momentum u`` of that velocity."""
    velocity = sgd(momentum)

    def direction(gradients: Tensors) -> Tensors:
        ahead = velocity(gradients)
        return {n: g + momentum * ahead[n] for n, g in gradients.items()}

    return direction


def adam(momentum: float = 0.0) -> StepRule:
    """Return Adam (Kingma and Ba 2015, algorithm 1): ``m^ / (sqrt(v^) + eps)``.

    The first step is a sign, whose derivative is zero but for gradients near zero, where it is
    huge. So values are Adam's, and derivatives those with a small share of the tensor's mean square
    added under the root.
    """
    del momentum
    first: Tensors = {}
    second: Tensors = {}
    steps = 0

    def direction(gradients: Tensors) -> Tensors:
        nonlocal first, second, steps
        steps += 1
        first = {n: _mean(BETA1, first.get(n), g) for n, g in gradients.items()}
        second = {n: _mean(BETA2, second.get(n), g.square()) for n, g in gradients.items()}
        return {
            n: _normalised(first[n] / (1.0 - BETA1**steps), second[n] / (1.0 - BETA2**steps))
            for n in gradients
        }

    return direction


RULES: dict[str, Callable[[float], StepRule]] = {
    "sgd": sgd,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adam,
}
"""Optimizers that are simulated, by the name that is declared, given the declared momentum."""


def is_decoupled(optimizer: str) -> bool:
    """Whether weight decay is added to the direction, as AdamW does, and not to the gradient."""
    return optimizer == "adamw"


def is_linear(optimizer: str) -> bool:
    """Whether what an optimizer moves by is a sum of gradients, whatever their sizes."""
    return optimizer in ("sgd", "nesterov")


def _mean(beta: float, before: Tensor | None, value: Tensor) -> Tensor:
    return (1.0 - beta) * value if before is None else beta * before + (1.0 - beta) * value


def _normalised(first: Tensor, second: Tensor) -> Tensor:
    exact = first / (second.clamp_min(1e-38).sqrt() + EPS)
    if not first.requires_grad:
        return exact
    size = second.detach().flatten(1).mean(dim=1).clamp_min(1e-30)
    under = second + _SMOOTHING * size.view(-1, *[1] * (second.dim() - 1))
    smooth = first / (under.sqrt() + EPS)
    return exact.detach() + smooth - smooth.detach()
