"""Find the sparse vectors of a subspace, and check them against the layer that made them.

The weight gradient of a linear layer is ``L^T X``: ``X`` (N, n) what entered it, ``L`` (N, m) the
loss' gradient of what left it. Behind a ReLU about half of ``L`` is zero, so the columns of
``L^T`` are the sparse vectors of the gradient's column space (Dimitrov et al. 2024, SPEAR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bract.attacks.methods.spear.low_rank import Direction, Subspace
from bract.attacks.reading.spectrum import complement, independent, shortened_most

_CLEAR, _SURE = 4.0, 0.3
"""Shares of the most that noise makes: an entry above the one is an entry, below the other zero."""

_MARGIN = 0.02
_COARSE = 1e-3
_LEAST_ZEROS = 0.02
_DEPENDENT = 1e-6
_SAME = 1.0 - 1e-6
_WIDE, _NARROW = 2.0, 1e-4
"""First and last width of a descent, in root mean squares of the vector's entries."""

_BETWEEN = 0.15
_NEAR = (0.3, 0.1, 0.03)
_DECAY = 0.88
_PROPOSALS = 64
_MOST_PRODUCTS = 1 << 24
"""Most products that are held at once: 128 MiB."""

_TURN = 4


@dataclass
class SparseSearch:
    """Collect the sparse vectors of a subspace until there are as many as it has dimensions.

    A vector is sought by iteratively reweighted least squares on ``sum_j log(v_j^2 + w^2)`` over
    ``v = left @ c``, |c| = 1, while w falls from wide to narrow; many starts run side by side.
    It is believed if an input exists in the row space that the layer itself would switch on where
    the vector has entries and off where it has none: with many more units than twice the rank
    hardly any other pattern passes (Cover 1965). Vectors that were found narrow the search for the
    others, whose coefficients are orthogonal to each known vector's input; the pattern bounds that
    on all sides.

    Attributes
    ----------
    weight
        ``(M, n)``: applied to the rows of `Subspace.inputs` it gives what leaves the layer.
    """

    space: Subspace
    weight: Tensor
    generator: torch.Generator
    found: list[Direction] = field(default_factory=list)
    proposals: int = 0
    rounds_done: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.space.rank == 1:
            one = torch.ones(1, dtype=torch.float64)
            self.found.append(
                Direction(one, torch.zeros(len(self.space.left), dtype=torch.bool), one)
            )
        self._products = products_of(self.space.left)
        self._outputs = self.weight @ self.space.right.T

    @property
    def done(self) -> bool:
        """Return whether there are as many vectors as dimensions, and all of them fit together."""
        return len(self.found) == self.space.rank and self._consistent()

    def rounds(self) -> Iterator[int]:
        """Search on, and yield the number of vectors after every round until all are found."""
        done = self.done
        while not done:
            if len(self.found) == self.space.rank:
                self._repair()
            elif self.found and self.rounds_done % _TURN:
                self._among_the_others()
            else:
                self._anywhere()
            if len(self.found) == self.space.rank - 1:
                self.found += [one for one in [self._last(self.found)] if one is not None]
            self.rounds_done += 1
            done = self.done
            yield len(self.found)

    def _consistent(self) -> bool:
        """Return whether every vector is zero where its input, given by all others, switches units
        off.
        """
        space = self.space
        vectors = torch.stack([d.coefficients for d in self.found])
        inputs = torch.linalg.inv(vectors / space.values)
        off = self._off(inputs * torch.sign(space.right[:, -1] @ inputs))
        entries = (space.left @ vectors.T).abs()
        return not bool((off & (entries > _CLEAR * space.noise_of(vectors).T)).any())

    def _repair(self) -> None:
        """Correct the one wrong vector, which all others determine; else drop the densest."""
        for one in self.found:
            others = [d for d in self.found if d is not one]
            last = self._last(others)
            if last is not None and float(last.coefficients @ one.coefficients) ** 2 < _SAME:
                self.found = [*others, last]
                return
        densest = min(self.found, key=lambda d: int(d.zeros.sum()))
        self.found = [d for d in self.found if d is not densest]

    def _anywhere(self) -> None:
        starts = self._draw(self.space.rank)
        self._take(anneal(self.space.left, self._products, starts, widths(_WIDE, _NARROW)))

    def _among_the_others(self) -> None:
        """Search where the inputs that go with known vectors leave room for others."""
        rank = self.space.rank
        inputs = torch.stack([d.dual for d in self.found])
        others = complement(inputs).T
        basis, back = torch.linalg.qr(self.space.left @ others)
        starts = self._draw(rank - len(self.found))
        coarse = anneal(basis, products_of(basis), starts, widths(_WIDE, _BETWEEN))
        near = unit(torch.linalg.solve(back, coarse.T).T @ others.T)
        first = _NEAR[self.proposals // _PROPOSALS % len(_NEAR)]
        self._take(anneal(self.space.left, self._products, near, widths(first, _NARROW)))

    def _last(self, others: list[Direction]) -> Direction | None:
        """Return the vector that is missing among all others, or None where they are not true.

        The input that is orthogonal to all of them is known, and so are the units it leaves off.
        """
        space = self.space
        known = torch.stack([d.coefficients for d in others]) / space.values
        only = shortened_most(known)
        only = only * torch.sign(space.right[:, -1] @ only)
        off = self._off(only)
        if int(off.sum()) < space.rank - 1:
            return None
        coefficients = self._without(off)
        entries = (space.left @ coefficients).abs()
        noise = space.noise_of(coefficients)
        together = torch.stack([*(d.coefficients for d in others), coefficients])
        if bool((entries > _CLEAR * noise)[off].any()) or not independent(together, _DEPENDENT):
            return None
        return Direction(coefficients, entries < _SURE * noise, only / space.values)

    def _off(self, inputs: Tensor) -> Tensor:
        """Return which units with a gradient an input ``(N,)`` or ``(N, K)`` leaves clearly off."""
        left = (self._outputs @ inputs)[self.space.live]
        return left < -_MARGIN * left.abs().mean(dim=0)

    def _draw(self, size: int) -> Tensor:
        self.proposals += _PROPOSALS
        made = torch.randn(_PROPOSALS, size, generator=self.generator, dtype=torch.float64)
        return unit(made)

    def _take(self, candidates: Tensor) -> None:
        space, before = self.space, len(self.found)
        coarse = _COARSE / math.sqrt(len(space.left)) + space.noise_of(candidates)
        near = ((candidates @ space.left.T).abs() < coarse).sum(dim=1)
        least = max(space.rank, _LEAST_ZEROS * len(space.left))
        for candidate in candidates[near >= least]:
            if len(self.found) == space.rank or (settled := self._settle(candidate)) is None:
                continue
            dual = self._input_of(*settled, [])
            together = torch.stack([*(d.coefficients for d in self.found), settled[0]])
            if dual is not None and independent(together, _DEPENDENT):
                self.found.append(Direction(*settled, dual))
        if len(self.found) > before:
            self._narrow()

    def _settle(self, coefficients: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the vector that is nearest to a candidate and has its zeros, with all its zeros.

        None where it has too few of them, or was seen before. Small entries that are none are
        distinguished as the zeros come nearer to the noise.
        """
        space = self.space
        below = _COARSE / math.sqrt(len(space.left))
        while True:
            noise = space.noise_of(coefficients)
            zeros = (space.left @ coefficients).abs() < noise.clamp_min(below)
            if int(zeros.sum()) < space.rank - 1:
                return None
            if below < float(noise.min()):
                break
            coefficients = self._without(zeros)
            below *= 0.1
        zeros = (space.left @ coefficients).abs() < _SURE * noise
        key = zeros.numpy().tobytes()
        if key in self._seen:
            return None
        self._seen.add(key)
        return coefficients, zeros

    def _without(self, zeros: Tensor) -> Tensor:
        """Coefficients of the vector that is smallest in some entries."""
        return shortened_most(self.space.left[zeros])

    def _narrow(self) -> None:
        """Estimate each known vector's input again: it is orthogonal to all other vectors.

        Where some have none, the densest of those is no vector of the layer's and goes.
        """
        while True:
            narrowed, without = [], []
            for one in self.found:
                others = [d.coefficients for d in self.found if d is not one]
                dual = self._input_of(one.coefficients, one.zeros, others)
                if dual is None:
                    without.append(one)
                else:
                    narrowed.append(Direction(one.coefficients, one.zeros, dual))
            if not without:
                self.found = narrowed
                return
            densest = min(without, key=lambda d: int(d.zeros.sum()))
            self.found = [d for d in self.found if d is not densest]

    def _input_of(self, coefficients: Tensor, zeros: Tensor, others: list[Tensor]) -> Tensor | None:
        """The input in the row space that switches on exactly what is not zero, or None.

        It is orthogonal to the coefficients of all other vectors. Entries near the noise imply
        nothing.
        """
        space = self.space
        clear = (space.left @ coefficients).abs() > _CLEAR * space.noise_of(coefficients)
        sign = torch.full((len(space.live),), -1.0, dtype=torch.float64)
        sign[space.live.nonzero()[:, 0]] = clear.to(torch.float64) - zeros.to(torch.float64)
        known = sign != 0
        above = torch.cat([sign[known, None] * self._outputs[known], space.right[:, -1][None]])
        equal = torch.stack(others) / space.values if others else None
        middle = inside(above, equal)
        return None if middle is None else middle / space.values


def inside(above: Tensor, zero: Tensor | None) -> Tensor | None:
    """Return the middle of the cone ``{x: above @ x >= 0, zero @ x = 0}``, or None if it is empty.

    The middle is the centre of the largest ball that fits into the cone and the cube of side 2.
    """
    from scipy.optimize import linprog

    rows = (above / above.norm(dim=1, keepdim=True).clamp_min(1e-300)).numpy()
    size = above.shape[1]
    solved = linprog(
        np.concatenate([np.zeros(size), [-1.0]]),
        A_ub=np.concatenate([-rows, np.ones((len(rows), 1))], axis=1),
        b_ub=np.zeros(len(rows)),
        A_eq=None if zero is None else np.pad(unit(zero).numpy(), ((0, 0), (0, 1))),
        b_eq=None if zero is None else np.zeros(len(zero)),
        bounds=[(-1.0, 1.0)] * size + [(None, None)],
        method="highs",
    )
    if solved.status != 0 or solved.x[size] <= 0.0:
        return None
    return torch.from_numpy(np.asarray(solved.x[:size]))


def widths(first: float, last: float) -> list[float]:
    """Return the widths of a descent, in root mean squares of a vector's entries."""
    count = math.ceil(math.log(last / first) / math.log(_DECAY))
    return [first * _DECAY**step for step in range(count + 1)]


def products_of(left: Tensor) -> Tensor | None:
    """Products of every two entries of a row, ``(m, N^2)``; None where they are too many to hold.

    With them the Gram matrices of many weights are one matrix product.
    """
    m, size = left.shape
    if m * size**2 > _MOST_PRODUCTS:
        return None
    return (left[:, :, None] * left[:, None, :]).flatten(1)


def grams(left: Tensor, products: Tensor | None, weights: Tensor) -> Tensor:
    """Return ``left^T diag(w) left`` for each row of weights ``(P, m)``, ``(P, N, N)``."""
    size = left.shape[1]
    if products is not None:
        return (weights @ products).view(-1, size, size)
    return torch.stack([left.T @ (row[:, None] * left) for row in weights])


def unit(rows: Tensor) -> Tensor:
    """Return the rows at length 1."""
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return scaled


def anneal(
    left: Tensor,
    products: Tensor | None,
    starts: Tensor,
    falling: list[float],
    noise: Tensor | None = None,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """Descend from unit rows ``(P, N)`` to coefficients of sparser vectors, float64 ``(P, N)``.

    Parameters
    ----------
    products
        `products_of` ``left``.
    falling
        The `widths`.
    noise
        ``(N,)``: deviation of each column of ``left``; no vector's width falls below its own.
    check
        Called before every width; raises where the time is over.
    """
    found, m = starts, len(left)
    for width in falling:
        check()
        squares = m * (found @ left.T).square()
        least: Tensor | float = width**2
        if noise is not None:
            own = m * (found * noise).square().sum(dim=1, keepdim=True)
            least = own.clamp_min(width**2)
        system = grams(left, products, 1.0 / (squares + least))
        scale = system.diagonal(dim1=1, dim2=2).mean(dim=1)
        found = torch.linalg.solve(system / scale[:, None, None], found[:, :, None])[:, :, 0]
        found = unit(found)
    return found
