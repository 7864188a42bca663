"""See what a training does to weights and gradients by hand, between what PyTorch calls.

A witness hears of backward passes and of optimizers' steps. Weights that are others at a forward
pass than the last step left them, and gradients that are others at a step than the backward pass
left them, were changed in between: by an average, a perturbation, the best epoch, noise, a term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

LOOKED_AT = 64
"""Steps of which passes and gradients are looked at; the end of a training always is."""

_VALUES = 256
"""Values of a tensor that are compared."""

_ALIKE = 0.01
"""Share of a gradient that is no multiple of the earlier one, up to which rounding may be why."""


class ByHand:
    """Compare a few values of every weight and gradient between the calls that are seen.

    Attributes
    ----------
    weights
        Whether a weight changed outside of the steps of an optimizer.
    gradients
        Whether gradients are no multiple of what the backward pass left, or one by a factor that
        neither clipping to a norm nor a scaler of gradients explains.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._known = {id(value) for value in self._parameters}
        self._left: list[Tensor] | None = None
        self._slopes: dict[int, Tensor] = {}
        self._steps = 0
        self._clamped = self._scaled = False
        self.weights = self.gradients = False

    def enters(self) -> None:
        """Look at the weights as a pass begins; of the first one they are as they should be."""
        if self._steps < LOOKED_AT:
            self._look()

    def differentiated(self) -> None:
        """Note the gradients that a backward pass left."""
        self._clamped = self._scaled = False
        if self._steps < LOOKED_AT and not self.gradients:
            self._slopes = _slopes(self._parameters)

    def stepped(self, optimizer: Optimizer, *, clamped: bool, scaled: bool) -> None:
        """Note the weights that a step left, and look at the gradients that it took.

        Parameters
        ----------
        clamped
            Whether gradients were clipped by value, which turns them.
        scaled
            Whether clipping or a scaler multiplied them.
        """
        self._left = self._few_weights()
        self._steps += 1
        # Several optimizers may step after one clipping.
        self._clamped, self._scaled = self._clamped or clamped, self._scaled or scaled
        slopes, self._slopes = self._slopes, {}
        if not slopes or self.gradients:
            return
        mine = [p for g in optimizer.param_groups for p in g["params"] if id(p) in self._known]
        now = _slopes(mine)
        self._slopes = {key: value for key, value in slopes.items() if key not in now}
        self.gradients = not self._clamped and _is_turned(slopes, now, scaled=self._scaled)

    def ends(self) -> None:
        """Look at the weights that the training ended with."""
        if self._steps:
            self._look()

    def _look(self) -> None:
        now, self._left = self._left, self._few_weights()
        if now is not None and not all(map(torch.equal, now, self._left)):
            self.weights = True

    def _few_weights(self) -> list[Tensor]:
        return [_few(v) for v in self._parameters if not (v.is_meta or is_lazy(v))]


def _slopes(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return a few values of the gradients that are there, by the identity of their parameters."""
    held = [(id(p), p.grad) for p in parameters]
    return {key: _few(g) for key, g in held if g is not None and g.layout is torch.strided}


def _few(value: Tensor) -> Tensor:
    """Return a copy of up to `_VALUES` values that are spread over a tensor."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _VALUES))].clone()


def _is_turned(before: Mapping[int, Tensor], now: Mapping[int, Tensor], *, scaled: bool) -> bool:
    """Return whether gradients are no multiple of the earlier ones, by what both have.

    Where nothing is known to have scaled them, they are no multiple but by one.
    """
    both = [key for key in now if key in before]
    if not both:
        return False
    one, other = (torch.cat([side[key].cpu().double() for key in both]) for side in (before, now))
    square, whole = float(one @ one), float(other @ other)
    if not (0.0 < square < math.inf and 0.0 < whole < math.inf):
        return False
    factor = float(one @ other) / square if scaled else 1.0
    apart = other - factor * one
    return float(apart @ apart) > _ALIKE**2 * whole
