"""Which units a ReLU let through, where their values are not known to rounding."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bract.attacks.methods.r_gap.block_equations import (
    ROUNDING,
    telling,
    weight_gradients,
    weights_of,
)
from bract.attacks.methods.r_gap.chain import Block
from bract.updates.update import Tensors

_NOISE = 1e-6
_SURE = 3.0
_DOUBTFUL = 0.5
_MOST = 6
"""Most units in doubt of one bias that are decided by it."""

_SIGNIFICANT = 9.0
"""Fall of the squared misfit, in squared deviations, that each changed unit must bring."""


def alive_units(
    values: Tensor,
    errors: Tensor,
    slope: Tensor,
    block: Block,
    state: Tensors,
    gradients: Tensors,
    trust: Tensors,
) -> Tensor:
    """Return where a ReLU's value is above zero, bool like ``values``.

    A value counts as above zero from three standard deviations on. A few near that are decided by
    the gradients of the biases before the ReLU: each is the sum of the loss' gradients at its units
    that are alive.

    Parameters
    ----------
    values, errors
        What left the ReLU, and its standard deviation.
    slope
        The loss' gradient at what left it.
    block
        What is before the ReLU.
    trust
        Weights of ``gradients``.
    """
    noise = _NOISE * float(values.abs().max())
    alive = values > _SURE * errors + noise
    doubtful = (values > _DOUBTFUL * errors) & (values < 2.0 * _SURE * errors) & (errors > noise)
    given = list(weights_of(block, gradients))
    speaking = telling(block, state, slope, given)
    biases = [name for name in given if name not in speaking and name in trust]
    places = doubtful.flatten().nonzero().flatten().tolist()
    if not biases or not places:
        return alive
    zero = torch.zeros(block.shape, dtype=torch.float64)

    def made(at: Tensor) -> Tensor:
        found = weight_gradients(block, state, zero, at, biases)
        return torch.cat([value.detach().flatten() for value in found])

    wanted = torch.cat([gradients[name].flatten() for name in biases])
    deviation = torch.cat([_deviations(gradients[name], trust[name]) for name in biases])
    off = made(slope * alive) - wanted
    flat, steep = alive.flatten(), slope.flatten()
    groups: dict[int, list[tuple[float, int, float]]] = {}
    for place in places:
        unit = torch.zeros_like(steep)
        unit[place] = steep[place]
        response = made(unit.view_as(slope))
        at = int(response.abs().argmax())
        sign = -1.0 if bool(flat[place]) else 1.0
        near = abs(float(values.flatten()[place] / errors.flatten()[place]) - _SURE)
        groups.setdefault(at, []).append((near, place, sign * float(response[at])))
    for at, units in groups.items():
        nearest = sorted(units)[:_MOST]
        best = (float(off[at]) / float(deviation[at])) ** 2
        chosen: tuple[tuple[float, int, float], ...] = ()
        for count in range(1, len(nearest) + 1):
            for some in itertools.combinations(nearest, count):
                left = (float(off[at]) + sum(one[2] for one in some)) / float(deviation[at])
                if left**2 + _SIGNIFICANT * (count - len(chosen)) < best:
                    best, chosen = left**2, some
        for _, place, _ in chosen:
            flat[place] = ~flat[place]
    return flat.view_as(alive)


def _deviations(gradient: Tensor, trust: Tensor) -> Tensor:
    size = float(gradient.square().mean().sqrt())
    return (ROUNDING * size / trust.clamp_min(1e-30).sqrt()).flatten().clamp_min(1e-300)
