"""From the logits back to the image, block by block, each by linear least squares (R-GAP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.methods.r_gap.activations import Activation
from bract.attacks.methods.r_gap.alive_units import alive_units
from bract.attacks.methods.r_gap.block_equations import (
    GAP,
    ROUNDING,
    Leaving,
    input_of,
    logit_gradient,
    telling,
    weight_gradients,
    weights_of,
)
from bract.attacks.methods.r_gap.chain import Block, Chain
from bract.errors import BractError
from bract.updates.update import Tensors

_PASSES = 3
_NOISE = 1e-6
_NEGATIVE = 2.0
_APART = 0.1

OPEN = 1e-9
"""Share of an input's dimensions that counts as none: one open direction among a million would be a
thousand times as much, and singular values down to 1e-5 of the largest column stay below it."""


@dataclass(frozen=True)
class Recursion:
    """What a recursion found.

    Attributes
    ----------
    inputs
        float64 ``(1, C, H, W)``, what the model saw.
    gaps
        Share of each block's input that its equations leave open, by the block's name, from the
        image on.
    residual
        Of the image's equations, relative to their right sides.
    entering
        float64, what enters each block, by the same names.
    """

    inputs: Tensor
    gaps: dict[str, float]
    residual: float
    entering: Tensors

    @property
    def filled(self) -> bool:
        """Return whether bounds, and least total variation of the image, filled gaps."""
        return any(gap > GAP for gap in self.gaps.values())

    @property
    def determined(self) -> bool:
        """Return whether the equations of every block have one solution, so that the image is
        unique.
        """
        return all(gap <= OPEN for gap in self.gaps.values())


def recurse(
    chain: Chain,
    state: Tensors,
    gradients: Tensors,
    trust: Tensors | None = None,
    *,
    low: Tensor,
    high: Tensor,
    most: int = 4096,
    report: Callable[[float], None] = lambda _: None,
    due: Callable[[], None] = lambda: None,
    near: Recursion | None = None,
) -> Recursion:
    """Solve for the input of every block, from the last one on (R-GAP, Zhu and Blaschko 2021).

    Where the activation behind a block is inverted, the block's input obeys two sets of linear
    equations: it makes what leaves the block; and with the loss' gradient there, which the chain
    rule gives, it makes the gradients of the block's weights. A ReLU's zeros leave their
    coordinates out of the first set and bound them from above instead, and inputs are in the range
    of the activation before. Only a single image's gradient is of this form.

    Parameters
    ----------
    state
        Parameters and buffers by name, float64.
    gradients
        Of the parameters, float64.
    trust
        Weights of their coordinates; None or empty where rounding alone is left.
    low, high
        Least and largest input of the model, ``(C, 1, 1)``.
    most
        Most values of a block's input for which gaps are filled.
    report
        Called with the share that is done.
    due
        Called between steps; raises a `BractError` where the time is over. What an earlier pass
        found is returned then.
    near
        What nearly the same gradients gave: conjugate gradients start there, and its gaps count.
    """
    best: Recursion | None = None
    for number in range(_PASSES):
        guess = None if best is None else best.inputs
        try:
            found = _pass(chain, state, gradients, trust or {}, (low, high), most, guess, due, near)
        except BractError:
            if best is None:
                raise
            return best
        if best is not None and not found.residual < best.residual:
            return best
        best = found
        hidden = list(found.gaps.values())[1:]
        report((number + 1) / _PASSES)
        if not any(gap > GAP for gap in hidden):
            break
    assert best is not None
    return best


def _pass(
    chain: Chain,
    state: Tensors,
    gradients: Tensors,
    trust: Tensors,
    range_of_inputs: tuple[Tensor, Tensor],
    most: int,
    guess: Tensor | None,
    due: Callable[[], None],
    near: Recursion | None,
) -> Recursion:
    """Go once from the logits to the image; a guess of the image fills gaps before its prior."""
    guesses = _entering(chain, state, guess)
    gaps: dict[str, float] = {}
    entering: Tensors = {}
    leaving: Leaving | None = None
    slope = logit_gradient(chain.blocks[-1], state, gradients, trust)
    for place in reversed(range(len(chain.blocks))):
        block = chain.blocks[place]
        before = chain.blocks[place - 1].activation if place else None
        _check_biases(block, state, gradients, trust, slope, gaps)
        bounds = range_of_inputs
        if before is not None:
            bounds = (slope.new_tensor(before.low), slope.new_tensor(before.high))
        weights = weights_of(block, gradients)
        known = None if near is None else (near.entering[block.name], near.gaps[block.name])
        solved, gap = input_of(
            block,
            state,
            weights,
            trust,
            slope,
            leaving,
            bounds,
            most,
            guesses.get(block.name),
            due,
            known,
        )
        gaps = {block.name: gap, **gaps}
        entering[block.name] = solved.value
        if before is not None:
            slope = _handed_down(block, state, solved.value, slope)
            alive = solved.value > _floor_noise(solved.value)
            if before.floor and solved.errors is not None:
                alive = alive_units(
                    solved.value,
                    solved.errors,
                    slope,
                    chain.blocks[place - 1],
                    state,
                    gradients,
                    trust,
                )
            leaving, slope = _behind(before, solved.value, solved.errors, alive, slope)
    return Recursion(inputs=solved.value, gaps=gaps, residual=solved.residual, entering=entering)


def _entering(chain: Chain, state: Tensors, guess: Tensor | None) -> Tensors:
    """Return what enters each block for an input of the model."""
    found: Tensors = {}
    if guess is None:
        return found
    values = guess
    with torch.no_grad():
        for block in chain.blocks:
            found[block.name] = values
            if block.activation is not None:
                values = block.activation.forward(block(values, state))
    return found


def _handed_down(block: Block, state: Tensors, values: Tensor, slope: Tensor) -> Tensor:
    """Return the loss' gradient at a block's input."""
    point = values.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((block(point, state) * slope).sum(), point)
    return found


def _behind(
    activation: Activation,
    values: Tensor,
    errors: Tensor | None,
    alive: Tensor,
    slope: Tensor,
) -> tuple[Leaving, Tensor]:
    """Go through an activation: what is known of its argument, and the gradient there.

    Parameters
    ----------
    errors
        Standard deviations of ``values``, or None.
    alive
        Where values are above the floor, if there is one.
    """
    below = None
    if activation.floor:
        values = torch.where(alive, values, torch.full_like(values, activation.low))
        below = ~alive
    steep = activation.slope(values)
    return Leaving(activation.inverse(values), steep, below, errors), slope * steep


def _floor_noise(values: Tensor) -> float:
    """Return the value up to which what an activation cut off is, but for errors.

    It made nothing negative, so that negative values are errors and show their size.
    """
    return max(_NOISE * float(values.abs().max()), -_NEGATIVE * float(values.min()))


def _check_biases(
    block: Block,
    state: Tensors,
    gradients: Tensors,
    trust: Tensors,
    slope: Tensor,
    gaps: dict[str, float],
) -> None:
    """Check gradients that do not depend on the input, as those of biases, against ``slope``."""
    zero = torch.zeros(block.shape, dtype=torch.float64)
    given = list(weights_of(block, gradients))
    speaking = telling(block, state, slope, given)
    fixed = [name for name in given if name not in speaking]
    for name, value in zip(fixed, weight_gradients(block, state, zero, slope, fixed), strict=True):
        weight = torch.ones_like(value.detach())
        if name in trust:
            weight = (1.0 + (1.0 / trust[name] - 1.0) * (ROUNDING / _APART) ** 2).rsqrt()
        length = float((weight * gradients[name]).norm())
        apart = float((weight * (value.detach() - gradients[name])).norm())
        if not apart <= _APART * length:
            later = ", ".join(f"{at} {share:.1%}" for at, share in gaps.items() if share > GAP)
            why = f"; its equations leave open, of what enters {later}" if later else ""
            raise BractError(
                f"the recursion does not reach {block.name}: it predicts a gradient of {name} "
                f"that is {apart / length if length else float('inf'):.3g} of its length off{why}",
                code="attack-unsolved",
            )
