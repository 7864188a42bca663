"""Linear equations for what enters one block of a chain, and their solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks.methods.r_gap.chain import Block
from bract.attacks.methods.r_gap.least_squares import (
    Limits,
    NormalEquations,
    Solution,
    all_columns,
    conjugate_gradients,
    matrix_of,
    undetermined,
)
from bract.attacks.methods.r_gap.rank_one import logit_gradient_from_weights
from bract.errors import BractError
from bract.updates.update import Tensors

STEPS = 1000
"""Most steps of conjugate gradients; a strided LeNet takes 400 to 800, a sparse gradient more."""

SHRUNK = 1e-9
"""Share of the first slope at which a solution that begins at nearly the same equations' counts: an
error of a hundredth of the change along directions a thousandth as strong as the strongest."""

GAP = 1e-3
"""Share of an input's dimensions that may stay open before limits and priors are asked."""

MOST_ENTRIES = 1 << 28
"""Most entries of the matrix that is factorised, 2 GiB."""

ROUNDING = 2e-7
"""Error of every equation, as a share of the tensor's root mean square, where each has its own."""

_IDENTITY = 1e-9


@dataclass(frozen=True)
class Leaving:
    """What is known of a block's output ``z``.

    Attributes
    ----------
    argument, slope
        It, and how much the activation's value moves with it.
    below
        Where only a ceiling is known, since the activation cut it off; None without.
    errors
        Standard deviations of the activation's values; None where rounding alone is left.
    """

    argument: Tensor
    slope: Tensor
    below: Tensor | None
    errors: Tensor | None = None


def logit_gradient(last: Block, state: Tensors, gradients: Tensors, trust: Tensors) -> Tensor:
    """Return the loss' gradient at the logits: that of the bias which is added to them.

    Where that is not known to rounding, the gradient of the last weights gives it.
    """
    probe = torch.zeros(last.shape, dtype=torch.float64)
    with torch.no_grad():
        plain = last(probe, state)
        for name in last.parameters:
            if name not in gradients or state[name].numel() != plain.numel():
                continue
            moved = torch.linspace(1.0, 2.0, plain.numel(), dtype=torch.float64)
            other = last(probe, state | {name: state[name] + moved.view_as(state[name])})
            if float((other - plain - moved.view_as(plain)).abs().max()) < _IDENTITY * max(
                1.0, float(plain.abs().max())
            ):
                found = gradients[name].reshape(plain.shape)
                return _by_weights(last, state, gradients, trust, name) if name in trust else found
    raise BractError(
        "its last layer has no bias, whose gradient is the loss' at the logits",
        code="attack-unsuited",
    )


def _by_weights(
    last: Block, state: Tensors, gradients: Tensors, trust: Tensors, bias: str
) -> Tensor:
    classes = state[bias].numel()
    matrices = [n for n in last.parameters if state[n].dim() == 2 and len(state[n]) == classes]
    if len(matrices) != 1:
        raise BractError(
            "its last layer is not linear, and the gradient of its bias is in doubt",
            code="attack-unsolved",
        )
    (name,) = matrices
    found = logit_gradient_from_weights(
        gradients[name],
        trust.get(name, torch.ones_like(gradients[name])),
        state[name],
        state[bias].flatten(),
        gradients[bias].flatten(),
    )
    return found.view(1, classes)


def weights_of(block: Block, gradients: Tensors) -> Tensors:
    """Return the gradients of a block's parameters."""
    return {name: gradients[name] for name in block.parameters if name in gradients}


def weight_gradients(
    block: Block, state: Tensors, values: Tensor, slope: Tensor, names: list[str]
) -> list[Tensor]:
    """Gradients of parameters for an input; affine in it, and differentiable."""
    if not names:
        return []
    given = {name: state[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        left = (block(values, state | given) * slope).sum()
        found = torch.autograd.grad(
            left, list(given.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
    return list(found)


def telling(block: Block, state: Tensors, slope: Tensor, names: list[str]) -> list[str]:
    """Return the parameters whose gradients depend on the input."""
    point = torch.zeros(block.shape, dtype=torch.float64).requires_grad_()
    found = []
    for name, value in zip(names, weight_gradients(block, state, point, slope, names), strict=True):
        if value.requires_grad:
            # A plain sum would not do: the loss' gradient at the logits sums to zero.
            mixed = torch.linspace(1.0, 2.0, value.numel(), dtype=value.dtype).view_as(value)
            (back,) = torch.autograd.grad(
                (value * mixed).sum(), point, allow_unused=True, retain_graph=True
            )
            if back is not None and bool(back.any()):
                found.append(name)
    return found


def input_of(
    block: Block,
    state: Tensors,
    gradients: Tensors,
    trust: Tensors,
    slope: Tensor,
    leaving: Leaving | None,
    bounds: tuple[Tensor, Tensor],
    most: int,
    guess: Tensor | None,
    due: Callable[[], None] = lambda: None,
    near: tuple[Tensor, float] | None = None,
) -> tuple[Solution, float]:
    """Solve for what enters a block; return it, and the share that equations leave open.

    Parameters
    ----------
    gradients
        Of the block's parameters.
    trust
        Weights of their coordinates, 1 where the error is well below `ROUNDING` of the tensor's
        root mean square; empty where rounding alone is left. With them, what enters comes with
        its errors, and what leaves is weighed by those of it.
    slope
        The loss' gradient at what leaves the block, like it.
    leaving
        None at the logits, where it is unknown.
    bounds
        Range of what enters; ``(C, 1, 1)`` for an image, numbers elsewhere.
    most
        Most dimensions that are solved for by factorisation.
    guess
        Where what the equations leave open begins; None for zero.
    due
        Called between steps; raises where the time is over.
    near
        Where conjugate gradients start, the solution of nearly the same equations, and the share
        that these leave open; None: at zero, and the share is estimated.
    """
    zero = torch.zeros(block.shape, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    names = [n for n in telling(block, state, slope, list(gradients)) if gradients[n].any()]
    offsets = [v.detach() for v in weight_gradients(block, state, zero, slope, names)]
    with torch.no_grad():
        made = block(zero, state)
    share, even = None, ROUNDING
    if leaving is not None:
        typical = float((leaving.argument * leaving.slope).square().mean().sqrt()) or 1.0
        share = leaving.slope / typical
        if leaving.errors is not None:
            alike = leaving.errors[leaving.slope != 0] / typical
            if len(alike) and bounds[1].dim() == 3:
                # What fills an image's gaps must not outweigh equations of usual precision.
                even = max(ROUNDING, float(alike.median()))
            share = share / (1.0 + (leaving.errors / (even * typical)).square()).sqrt()
            trust = {
                n: 1.0 / (1.0 + (1.0 / w - 1.0) * (ROUNDING / even) ** 2) for n, w in trust.items()
            }
    scales = [_scale(gradients[name]) * trust.get(name, one).sqrt() for name in names]
    right = [
        (gradients[name] - offset) * scale
        for name, offset, scale in zip(names, offsets, scales, strict=True)
    ]
    if leaving is not None and share is not None:
        right.append((leaving.argument - made) * share)

    def of_weights(values: Tensor) -> list[Tensor]:
        return [
            (gradient - offset) * scale
            for gradient, offset, scale in zip(
                weight_gradients(block, state, values, slope, names), offsets, scales, strict=True
            )
        ]

    def rows(values: Tensor) -> list[Tensor]:
        outputs = [] if share is None else [(block(values, state) - made) * share]
        return [*of_weights(values), *outputs]

    if not right:
        raise BractError(
            f"no gradient of {block.name or 'a block without weights'} to go by",
            code="attack-evidence",
        )
    alive = 0 if share is None else int((share != 0).sum())
    # Fewer equations than unknowns leave a gap, whatever they are.
    known = sum(gradients[name].numel() for name in names) + alive
    if not trust and known >= (1.0 - GAP) * zero.numel():
        start, gap = (zero, None) if near is None or near[1] > GAP else near
        shrunk = 0.0 if gap is None else SHRUNK
        solved = conjugate_gradients(rows, right, start, steps=STEPS, shrunk=shrunk, due=due)
        if solved.met:
            gap = undetermined(rows, zero, steps=STEPS, due=due) if gap is None else gap
            if gap <= GAP:
                return solved, gap
    if zero.numel() > most:
        why = (
            "are known unevenly well" if trust else "leave some of it open or are nearly dependent"
        )
        raise BractError(
            f"the equations of what enters {block.name} {why}, and {zero.numel()} unknowns are "
            f"more than max_unknowns ({most})",
            code="attack-unsolved",
        )
    count = sum(group.numel() for group in right)
    if count * zero.numel() > MOST_ENTRIES:
        raise BractError(
            f"the equations of what enters {block.name} leave some of it open or are nearly "
            f"dependent, and {count} of them for {zero.numel()} unknowns are too many to factorise",
            code="attack-unsolved",
        )
    outputs, matrix = None, matrix_of(of_weights, zero)
    if share is not None:
        outputs = all_columns(lambda values: block(values, state) - made, zero)
        matrix = torch.cat([matrix, outputs * share.flatten()[:, None]])
    equations = NormalEquations(matrix, torch.cat([one.flatten() for one in right]), block.shape)
    solved, gap = equations.solve(guess)
    errors = None
    if trust:
        assert solved.errors is not None
        errors = even * solved.errors
    if gap > GAP:
        image = bounds[1].dim() == 3
        solved = equations.completed(
            solved.value,
            _limits(outputs, made, leaving, bounds),
            variation=image,
            due=due,
        )
    return replace(solved, errors=errors), gap


def _limits(
    outputs: Tensor | None, made: Tensor, leaving: Leaving | None, bounds: tuple[Tensor, Tensor]
) -> Limits:
    """Return the range of what enters, and that what a ReLU cut off was not above zero.

    ``outputs`` is the matrix from what enters to what leaves the block, which is ``made`` at zero.
    """
    if outputs is None or leaving is None or leaving.below is None:
        return Limits(*bounds)
    below = leaving.below
    return Limits(*bounds, matrix=outputs[below.flatten()], most=-made[below])


def _scale(gradient: Tensor) -> float:
    """Return what makes the strongest output channel's gradient one in size."""
    sizes = gradient.flatten(1).square().mean(dim=1) if gradient.dim() > 1 else gradient.square()
    return 1.0 / float(sizes.max().sqrt())
