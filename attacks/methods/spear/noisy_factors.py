"""All rows of L and all inputs at once, fitted to a gradient under noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.methods.spear.low_rank import Subspace
from bract.attacks.methods.spear.sparse_directions import unit

_ROUNDS = 20
_SETTLED = 0.9999
_UNMIXINGS, _FEWEST = 20, 8
_SPARED = 3.0
"""Deviations of a pixel's noise by which it may leave its range at no cost."""

_ROUNDED = 1e-3
"""Share of its range by which a pixel may leave it at no cost without noise."""

_CERTAIN = 30.0
"""Most that an entry's size counts, in nats, against the input that switches it on or off."""

_STEEPEST, _SWITCHING, _FIRM = 200.0, 10.0, 40.0
"""Most log odds of an entry where what leaves the layer is its root mean square, for one gradient;
and for several local steps, between which units switch: to decide on zeros, and to judge a set.
Noise on the inputs lowers them."""

_HELD, _OPEN = 60.0, 20.0
"""Most nats by which an input decides on a zero, for one gradient and for several steps."""

_FLATTEST = 5.0
_PROBIT = 1.7
"""Slope of the logistic curve that is nearest to a normal distribution's."""


@dataclass(frozen=True)
class NoisyFactors:
    """``gradient = L^T X`` plus noise, all float64 but ``on``.

    Attributes
    ----------
    inputs
        X in coordinates of the row space, ``(N, N)``, each row with a bias above 0; its scale is
        open.
    rows
        L, ``(N, m)``.
    on
        bool ``(m, N)``: entries of L that are not zero.
    misfit
        Squared error over what noise of the known deviation leaves: 1 for the true factors.
    cost
        Nats an entry: misfit, the bits of every entry that is not zero, disagreement of zeros and
        inputs, and inputs outside their range. The least is best; more entries alone do not lower
        it.
    agreement
        ``(N,)``: share of units that are an entry exactly where the input switches them on.
    """

    inputs: Tensor
    rows: Tensor
    on: Tensor
    misfit: float
    cost: float
    agreement: Tensor

    def coefficients(self, space: Subspace) -> Tensor:
        """Unit rows ``(N, N)`` for which ``left @ c`` are the rows of L, as the inputs give them.

        They follow from the inputs alone: every vector is orthogonal to all other inputs.
        """
        return unit(space.values * torch.linalg.inv(self.inputs).T)


@dataclass(frozen=True)
class Layer:
    """What a layer makes of an input, and what may enter it.

    Attributes
    ----------
    outputs
        ``(m, N)``: applied to coordinates of the row space it gives what leaves the layer.
    length
        Root mean square length of the layer's rows of weights.
    low, high
        Range of what enters, ``(n - 1,)`` each, or None where it is not known.
    switching
        Whether units switch while the gradient is summed, as in several local steps.
    """

    outputs: Tensor
    length: float
    low: Tensor | None = None
    high: Tensor | None = None
    switching: bool = False

    def within(self, space: Subspace, inputs: Tensor) -> Tensor:
        """Return inputs ``(N, N)``, scaled by their bias, moved into their range."""
        bias = inputs @ space.right[:, -1:]
        if self.low is None or self.high is None or not bool((bias > 0).all()):
            return inputs
        entering = (inputs / bias) @ space.right[:, :-1]
        inside = torch.minimum(torch.maximum(entering, self.low), self.high)
        moved: Tensor = inputs + bias * ((inside - entering) @ space.right[:, :-1].T)
        return moved

    def outside(self, space: Subspace, inputs: Tensor, rows: Tensor) -> float:
        """Return nats by which inputs with rows of L ``(m, N)`` leave their range beyond noise."""
        bias = inputs @ space.right[:, -1:]
        if self.low is None or self.high is None:
            return 0.0
        entering = (inputs / bias) @ space.right[:, :-1]
        spared = _ROUNDED * (self.high - self.low)
        excess = torch.maximum(self.low - entering, entering - self.high) - spared
        noise = space.deviation / (rows.norm(dim=0)[:, None] * bias.abs()).clamp_min(1e-300)
        # The scale comes from the bias, whose noise is a pixel's.
        noise = noise * (1.0 + entering.square()).sqrt()
        beyond = (excess / noise - _SPARED).clamp(0.0, _CERTAIN)
        return float(0.5 * beyond.square().sum())


def alternate(
    space: Subspace,
    layer: Layer,
    inputs: Tensor,
    check: Callable[[], None] = lambda: None,
) -> NoisyFactors | None:
    """Fit L and X in turn, each by least squares, from inputs ``(N, N)`` of the row space.

    Between the two every entry of L is decided to be zero or not, by its size in deviations of its
    noise, and by the side of the ReLU on which its input is; and inputs are moved into their range.
    None where the inputs are dependent. ``check`` is called before every turn, and raises where the
    time is over.
    """
    wanted = space.left * space.values
    bias = space.right[:, -1]
    now = unit(inputs * torch.sign(inputs @ bias)[:, None]) * space.values.mean()
    best: NoisyFactors | None = None
    last = float("inf")
    for _ in range(_ROUNDS):
        check()
        found = _rows_for(space, layer, now, wanted)
        if found is None:
            break
        if best is None or found.cost < best.cost:
            best = found
        if found.cost > last - (1.0 - _SETTLED) * abs(last):
            break
        last = found.cost
        now = torch.linalg.lstsq(found.rows.T, wanted).solution
        if not bool(torch.isfinite(now).all()):
            break
        now = layer.within(space, now * torch.sign(now @ bias)[:, None])
    return best


def unmixed(
    space: Subspace,
    layer: Layer,
    found: NoisyFactors,
    check: Callable[[], None] = lambda: None,
) -> NoisyFactors:
    """Take shares of one row of L out of another one, as long as that lowers the cost.

    ``l_a x_a + l_b x_b = l_a (x_a + f x_b) + (l_b - f l_a) x_b``: where one input switches almost
    only units on that the other one does, a blend of the two is nearly as sparse as the row itself.
    The f that makes most entries of a row zero is tried for every pair. ``check`` is called before
    each, and raises where the time is over.
    """
    wanted = space.left * space.values
    best, size = found, space.rank
    for _ in range(_UNMIXINGS):
        inverse = torch.linalg.inv(best.inputs @ best.inputs.T)
        free = wanted @ best.inputs.T @ inverse
        noise = space.deviation * inverse.diagonal().sqrt()
        tried = []
        for one in range(size):
            held = best.on[:, one] & (free[:, one].abs() > _SPARED * noise[one])
            for other in range(size):
                if one == other or int(held.sum()) < _FEWEST:
                    continue
                check()
                share = _share(free[held, one], free[held, other], noise[one], noise[other])
                inputs = best.inputs.clone()
                inputs[one] += share * inputs[other]
                inputs = layer.within(space, inputs * torch.sign(inputs @ space.right[:, -1:]))
                if (moved := _rows_for(space, layer, inputs, wanted)) is not None:
                    tried.append(moved)
        least = min(tried, key=lambda factors: factors.cost, default=best)
        if least.cost >= best.cost:
            break
        then = alternate(space, layer, least.inputs, check)
        best = min([least, *([then] if then else [])], key=lambda factors: factors.cost)
    return best


def _share(one: Tensor, other: Tensor, one_noise: Tensor, other_noise: Tensor) -> Tensor:
    """The f other than 0 that makes most entries of ``other - f one`` zero, to their noise."""
    ratios = other / one
    spread = (other_noise**2 + (ratios * one_noise) ** 2).sqrt() / one.abs()
    near = torch.exp(-0.5 * ((ratios[:, None] - ratios) / spread[:, None]).square())
    score = near.sum(dim=0)
    # Where the other row is zero already, f is 0.
    return ratios[torch.where(ratios.abs() > _SPARED * spread, score, 0.0).argmax()]


def _rows_for(space: Subspace, layer: Layer, inputs: Tensor, wanted: Tensor) -> NoisyFactors | None:
    """Decide the zeros for given inputs, and fit the other entries."""
    products = inputs @ inputs.T
    inverse, singular = torch.linalg.inv_ex(products)
    if bool(singular) or not bool((inverse.diagonal() > 0).all()):
        return None
    free = wanted @ inputs.T @ inverse
    zero = space.deviation**2 * inverse.diagonal()
    gate = layer.outputs @ inputs.T
    size = gate.square().mean(dim=0).sqrt()
    gate, side = gate / size, gate > 0
    sums = (free.square() * side).sum(dim=0)
    spread = sums / side.sum(dim=0).clamp_min(1)
    # What an input's noise makes of what leaves the layer, as a share of it.
    blur = layer.length * space.deviation / (sums.sqrt() * size).clamp_min(1e-300)
    wide = torch.maximum(spread, 4.0 * zero) + zero
    dear = 0.5 * (wide / zero).log()
    odds = 0.5 * free.square() * (1.0 / zero - 1.0 / wide) - dear
    slope = (_PROBIT / blur).clamp(_FLATTEST, _STEEPEST)
    deciding = slope.clamp_max(_SWITCHING) if layer.switching else slope
    trusted = _OPEN if layer.switching else _HELD
    push = (deciding * gate).clamp(-trusted, trusted)
    on = push + odds.clamp(-_CERTAIN, _CERTAIN) > 0
    push = (slope.clamp_max(_FIRM) if layer.switching else slope) * gate
    rows = _least_squares(products, wanted @ inputs.T, on)
    squared = float((wanted - rows @ inputs).square().sum()) / space.deviation**2
    signed = torch.where(on, push, -push)
    disagreement = -torch.nn.functional.logsigmoid(signed)
    cost = 0.5 * squared + float((dear * on).sum() + disagreement.sum())
    cost += layer.outside(space, inputs, rows)
    return NoisyFactors(
        inputs,
        rows.T,
        on,
        squared / max(1, on.numel() - int(on.sum())),
        cost / on.numel(),
        ((odds > 0) == side).to(torch.float64).mean(dim=0),
    )


def _least_squares(products: Tensor, right: Tensor, on: Tensor) -> Tensor:
    """Least squares for L^T ``(m, N)``, zero where it is not ``on``."""
    both = on[:, :, None] & on[:, None, :]
    alone = torch.diag_embed((~on).to(products.dtype) * products.diagonal())
    system = torch.where(both, products, 0.0) + alone
    solved, _ = torch.linalg.solve_ex(system, (right * on)[:, :, None])
    kept: Tensor = torch.nan_to_num(solved[:, :, 0]) * on
    return kept
