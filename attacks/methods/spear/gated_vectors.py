"""Sparse vectors of a subspace that noise blurs, each a mixture that the layer itself gates.

A row of L is zero where its input switches a unit off. Noise makes zeros small instead, and hides
small entries among them, so that no vector can be checked entry by entry (`sparse_directions`).
Here each entry of ``v = left @ c`` is zero, ``v_k ~ N(0, nu^2)`` with the noise's own ``nu``, or
not, ``v_k ~ N(0, s^2)``; and the odds of the two follow from what leaves the layer for an input
``u`` of the row space, ``log odds = (outputs @ u)_k``. Expectation maximisation fits c, u and s
together: the dictionary learning of SPEAR++ (Bakarsky et al. 2025) in the place of its sampling,
with the consistency of SPEAR (Dimitrov et al. 2024, their lambda) inside the objective and not as a
check after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.methods.spear.low_rank import Subspace
from bract.attacks.methods.spear.sparse_directions import anneal, grams, products_of, unit, widths

_WIDE, _NARROW = 2.0, 1e-4
_ROUNDS = 25
_FIRST_NEWTON = 4
_RIDGE = 1e-4
"""Weight of ``|u|^2`` in the gate, in units of the entries: inputs spread as the row space does."""

_GATE = 8.0
_WIDEST_ZERO, _ZERO_DECAY = 3e-3, 0.5
"""Deviation of zeros in the first round, in root mean squares of a vector, and its fall a round."""

_BARELY = 1e-4
_SAME = 0.98


@dataclass(frozen=True)
class GatedVectors:
    """Candidates for rows of L, all float64 but ``on``.

    Attributes
    ----------
    coefficients
        Unit rows ``(P, N)``: the vectors are ``left @ c``.
    inputs
        ``(P, N)``: coordinates, in the row space, of an input that switches the entries on.
    agreement
        ``(P,)``: share of units that are an entry exactly where the input switches them on.
    on
        bool ``(P, m)``: units that the input switches on.
    """

    coefficients: Tensor
    inputs: Tensor
    agreement: Tensor
    on: Tensor

    def kept(self, indices: list[int]) -> GatedVectors:
        """Return some of the candidates."""
        return GatedVectors(
            self.coefficients[indices],
            self.inputs[indices],
            self.agreement[indices],
            self.on[indices],
        )

    def joined(self, other: GatedVectors) -> GatedVectors:
        """Return these candidates and those of another draw."""
        return GatedVectors(
            torch.cat([self.coefficients, other.coefficients]),
            torch.cat([self.inputs, other.inputs]),
            torch.cat([self.agreement, other.agreement]),
            torch.cat([self.on, other.on]),
        )


def descended(
    space: Subspace,
    starts: Tensor,
    first: float = _WIDE,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """Descend from unit rows ``(P, N)`` to sparse vectors, no narrower than their noise."""
    return anneal(
        space.left,
        products_of(space.left),
        starts,
        widths(first, _NARROW),
        space.deviation / space.values,
        check,
    )


def distinct(space: Subspace, candidates: Tensor, most: int) -> Tensor:
    """Return up to ``most`` of the candidates ``(P, N)``, the sparsest first, each direction once.

    Sparse is a vector by the mean logarithm of its squared entries plus its noise, against that of
    their mean, so that a vector of noise alone is not.
    """
    noise = _noise(space, candidates).square()
    squares = (candidates @ space.left.T).square()
    score = (squares + noise).log().mean(dim=1) - (squares.mean(dim=1) + noise[:, 0]).log()
    kept: list[int] = []
    for index in score.argsort().tolist():
        if kept and float((candidates[kept] @ candidates[index]).square().max()) > _SAME:
            continue
        kept.append(index)
        if len(kept) == most:
            break
    return candidates[kept]


def fitted(
    space: Subspace,
    outputs: Tensor,
    candidates: Tensor,
    check: Callable[[], None] = lambda: None,
) -> GatedVectors:
    """Fit the mixture from candidates ``(P, N)``.

    Parameters
    ----------
    outputs
        ``(m, N)``: applied to coordinates of the row space it gives what leaves the layer.
    check
        Called before every round; raises where the time is over.
    """
    left, (m, size) = space.left, space.left.shape
    products = products_of(left)
    gates = outputs * space.values
    gates = gates / (gates.norm() / math.sqrt(m * size))
    gate_products = products_of(gates)
    vectors = candidates
    inputs = torch.zeros_like(candidates)
    gate = torch.zeros(len(candidates), m, dtype=torch.float64)
    spread = torch.full((len(candidates), 1), 2.0 / m, dtype=torch.float64)
    for number in range(_ROUNDS):
        check()
        least = (_WIDEST_ZERO * _ZERO_DECAY**number) ** 2 / m
        zero = _noise(space, vectors).square().clamp_min(least)
        squares = (vectors @ left.T).square()
        spread = torch.maximum(spread, 2.0 * zero)
        entry = torch.sigmoid(_log_odds(squares, zero, spread) + gate)
        total = entry.sum(dim=1, keepdim=True).clamp_min(1e-9)
        spread = (entry * squares).sum(dim=1, keepdim=True) / total
        spread = torch.maximum(spread, 2.0 * zero)
        for _ in range(_FIRST_NEWTON if number == 0 else 1):
            inputs = _newton(gates, gate_products, entry, inputs)
        gate = (inputs @ gates.T).clamp(-_GATE, _GATE)
        system = grams(left, products, (1.0 - entry) / zero + entry / spread)
        scale = system.diagonal(dim1=1, dim2=2).mean(dim=1)
        solved = torch.linalg.solve(system / scale[:, None, None], vectors[:, :, None])
        vectors = unit(solved[:, :, 0])
    zero = _noise(space, vectors).square().clamp_min(1e-30)
    squares = (vectors @ left.T).square()
    spread = torch.maximum(spread, 2.0 * zero)
    on = gate > 0
    entries = _log_odds(squares, zero, spread) + gate > 0
    agreement = (on == entries).to(torch.float64).mean(dim=1)
    return GatedVectors(vectors, inputs * space.values, agreement, on)


def _noise(space: Subspace, coefficients: Tensor) -> Tensor:
    """Deviation of the noise in each entry of ``left @ c``, ``(P, 1)``."""
    length: Tensor = (coefficients / space.values).norm(dim=1, keepdim=True)
    return space.deviation * length + 1e-16


def _log_odds(squares: Tensor, zero: Tensor, spread: Tensor) -> Tensor:
    """Log odds of an entry against a zero, from its square and both variances."""
    return 0.5 * (squares * (1.0 / zero - 1.0 / spread) - (spread / zero).log())


def _newton(gates: Tensor, products: Tensor | None, entry: Tensor, inputs: Tensor) -> Tensor:
    """One step of Newton's for the inputs ``(P, N)`` that make the odds of the entries."""
    m, size = gates.shape
    now = torch.sigmoid(inputs @ gates.T)
    slope = (entry - now) @ gates - _RIDGE * m * inputs
    curve = grams(gates, products, now * (1.0 - now) + _BARELY)
    curve = curve + _RIDGE * m * torch.eye(size, dtype=torch.float64)
    step: Tensor = torch.linalg.solve(curve, slope[:, :, None])[:, :, 0]
    return inputs + step
