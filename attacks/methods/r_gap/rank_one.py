"""The loss' gradient at the logits from the gradient of the last layer's weights alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.errors import BractError

_ALTERNATIONS = 200
_SETTLED = 1e-13
_LARGEST = 2.0**0.5
_GRID = 2000
_NARROWED = 80
_APART = 0.05


def factors(matrix: Tensor, trust: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the weighted best ``left right^T`` of a matrix, and what it leaves of it.

    Alternating least squares, from the row that carries most trust. ``left`` has norm 1.

    Parameters
    ----------
    matrix, trust
        ``(rows, columns)``; trust is the weight of each coordinate's square.
    """
    weighted = trust * matrix
    whole = float((weighted * matrix).sum())
    right = matrix[(weighted * matrix).sum(dim=1).argmax()]
    left, before = matrix[:, 0], float("inf")
    for _ in range(_ALTERNATIONS):
        left = (weighted @ right) / (trust @ right.square()).clamp_min(1e-300)
        left = left / left.norm().clamp_min(1e-300)
        right = (left @ weighted) / (left.square() @ trust).clamp_min(1e-300)
        rest = float((trust * (matrix - torch.outer(left, right)).square()).sum())
        if rest >= before * (1.0 - 1e-6) or rest <= _SETTLED**2 * whole:
            break
        before = rest
    return left, right, (rest / whole) ** 0.5 if whole else 1.0


def logit_gradient_from_weights(
    gradient: Tensor, trust: Tensor, weight: Tensor, bias: Tensor, sign: Tensor
) -> Tensor:
    """Return the gradient at the logits ``p - y``, ``(classes,)``, of one example.

    The gradient of the last layer's weights is ``(p - y) x^T`` with its input ``x``. Its factors
    leave a number ``a`` open, ``p - y = a l`` and ``x = r / a``, which the softmax decides:
    ``softmax(W r / a + b) - y = a l``.

    Parameters
    ----------
    gradient, trust
        Of the weights, ``(classes, features)``.
    weight, bias
        Of the layer.
    sign
        Signs of ``p - y``, of which one alone is negative: that of the label.

    Raises
    ------
    BractError
        If the gradient is not of one example under a cross entropy.
    """
    left, right, rest = factors(gradient, trust)
    label = int(sign.argmin())
    if float(left[label]) > 0.0:
        left, right = -left, -right
    if not rest <= _APART:
        raise BractError(
            "the gradient of its last weights is not of one example: off by "
            f"{rest:.3g} of its length",
            code="attack-unsolved",
        )
    part = weight @ right
    target = torch.zeros_like(bias)
    target[label] = 1.0

    def apart(lengths: Tensor) -> Tensor:
        logits = part / lengths[:, None] + bias
        made = (logits.softmax(dim=1) - target) / lengths[:, None]
        return (made - left).square().sum(dim=1)

    lengths = torch.logspace(-8, 0, _GRID, dtype=left.dtype) * _LARGEST
    at = int(apart(lengths).argmin())
    low, high = (float(lengths[max(at - 1, 0)]), float(lengths[min(at + 1, _GRID - 1)]))
    for _ in range(_NARROWED):
        third = (high - low) / 3.0
        inner = lengths.new_tensor([low + third, high - third])
        below = apart(inner)
        low, high = (low, float(inner[1])) if below[0] <= below[1] else (float(inner[0]), high)
    return left * 0.5 * (low + high)
