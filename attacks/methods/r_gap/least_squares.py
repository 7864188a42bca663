"""Linear least squares for an image or a layer's input, matrix-free, with what leaves gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Rows = Callable[[Tensor], Sequence[Tensor]]
"""A linear map from the unknown to groups of equations, differentiable by autograd."""

CONVERGED = 1e-12
"""Relative residual, and angle between residual and range, at which CGLS stops."""

FLOOR = 1e-15
"""Slope, relative to the right sides, that rounding leaves: with a residual of theirs, an angle of
`CONVERGED` is below it."""


@dataclass(frozen=True)
class Solution:
    """A solution and how well it was met.

    Attributes
    ----------
    value
        Like the unknown.
    residual
        Norm of what is left of the right sides, relative to theirs.
    steps
        Steps of conjugate gradients, or factorisations.
    met
        Whether steps sufficed.
    errors
        Standard deviation of ``value`` for errors of one in every equation, or None.
    """

    value: Tensor
    residual: float
    steps: int
    met: bool = True
    errors: Tensor | None = None


def conjugate_gradients(
    rows: Rows,
    right: Sequence[Tensor],
    start: Tensor,
    *,
    steps: int,
    shrunk: float = 0.0,
    due: Callable[[], None] = lambda: None,
) -> Solution:
    """Minimise ``sum_i |rows(u)_i - right_i|^2`` by CGLS (Hestenes and Stiefel 1952).

    Started at zero it finds the solution of least norm, elsewhere the one nearest to ``start``.

    Parameters
    ----------
    rows
        Linear, not affine; a group weighs as it is scaled.
    start
        float64, the shape of the unknown.
    steps
        Most steps; it stops earlier when the normal equations are met.
    shrunk
        Share of the first slope that counts as met, too.
    due
        Called between steps; raises where the time is over.
    """
    value = start.clone()
    mapped = LinearMap(rows, start)
    left = [r - m for r, m in zip(right, mapped.forward(start), strict=True)]
    whole = _squared(right)
    slope = mapped.back(left)
    direction, height = slope, float(slope.square().sum())
    largest, first = 0.0, height
    taken = 0
    while taken < steps:
        due()
        remains = _squared(left)
        level = largest * (CONVERGED**2 * remains + FLOOR**2 * whole)
        if remains <= CONVERGED**2 * whole or height <= max(level, shrunk**2 * first):
            return Solution(value, (remains / whole) ** 0.5 if whole else 0.0, taken)
        made = mapped.forward(direction)
        size, span = _squared(made), float(direction.square().sum())
        largest = max(largest, size / span)
        if size <= 0.0:
            break
        length = height / size
        value = value + length * direction
        left = [v - length * m for v, m in zip(left, made, strict=True)]
        slope = mapped.back(left)
        before, height = height, float(slope.square().sum())
        direction = slope + (height / before) * direction
        taken += 1
    return Solution(value, (_squared(left) / whole) ** 0.5 if whole else 0.0, taken, met=False)


def undetermined(
    rows: Rows, like: Tensor, *, steps: int, due: Callable[[], None] = lambda: None
) -> float:
    """Estimate the share of the unknown's dimensions that no equation touches, in [0, 1].

    A random vector loses in its projection on the row space what is outside: the estimate scatters
    by about ``sqrt(2 share (1 - share) / dimensions)``.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    made = LinearMap(rows, like).forward(drawn)
    seen = conjugate_gradients(rows, made, torch.zeros_like(drawn), steps=steps, due=due).value
    return float((drawn - seen).square().sum() / drawn.square().sum())


class LinearMap:
    """Linear rows and their transpose, each a pass through a graph that is built once.

    The transpose is the rows' vector-Jacobian product, and as it is linear, too, the rows are that
    of the transpose.

    Parameters
    ----------
    rows
        Linear, not affine.
    like
        Of the unknown's shape and type.
    """

    def __init__(self, rows: Rows, like: Tensor) -> None:
        self._point = torch.zeros_like(like).requires_grad_()
        with torch.enable_grad():
            self._made = list(rows(self._point))
            self._groups = [torch.zeros_like(one).requires_grad_() for one in self._made]
            (self._back,) = torch.autograd.grad(
                self._made, self._point, self._groups, create_graph=True
            )

    def forward(self, value: Tensor) -> list[Tensor]:
        """Return the rows of a value."""
        return list(
            torch.autograd.grad(
                self._back, self._groups, value, retain_graph=True, materialize_grads=True
            )
        )

    def back(self, groups: Sequence[Tensor]) -> Tensor:
        """Return the transpose of one vector for each group of rows."""
        (found,) = torch.autograd.grad(self._made, self._point, list(groups), retain_graph=True)
        return found


def _squared(groups: Sequence[Tensor]) -> float:
    return sum(float(one.square().sum()) for one in groups)


def matrix_of(rows: Rows, like: Tensor) -> Tensor:
    """Return linear rows as a matrix ``(equations, dimensions)``, by passes of the shorter side."""
    units = [torch.zeros_like(one) for one in rows(like)]
    if not units:
        return like.new_empty(0, like.numel())
    mapped, unit = LinearMap(rows, like), torch.zeros_like(like)
    if sum(one.numel() for one in units) < like.numel():
        return torch.stack([mapped.back(units).flatten() for _ in _each(units)])
    columns = (mapped.forward(unit) for _ in _each([unit]))
    return torch.stack([torch.cat([one.flatten() for one in made]) for made in columns]).T


def _each(units: Sequence[Tensor]) -> Iterator[None]:
    """Set each of the numbers to one in turn, in place, and the others to zero."""
    for unit in units:
        flat = unit.view(-1)
        for place in range(len(flat)):
            flat[place] = 1.0
            yield
            flat[place] = 0.0


def all_columns(row: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return a linear function as a matrix ``(equations, dimensions)``, many columns at a time."""
    units = torch.eye(like.numel(), dtype=like.dtype).view(-1, *like.shape)
    with torch.no_grad():
        return torch.func.vmap(row, chunk_size=_TOGETHER)(units).flatten(1).T


@dataclass(frozen=True)
class Limits:
    """Inequalities on unknowns, in addition to equations.

    Attributes
    ----------
    low, high
        Broadcast to the unknown.
    matrix, most
        ``matrix @ u <= most``, ``(constraints, dimensions)`` and ``(constraints,)``; None without.
    """

    low: Tensor
    high: Tensor
    matrix: Tensor | None = None
    most: Tensor | None = None


class NormalEquations:
    """Least squares by Cholesky's factorisation; for up to some thousand dimensions.

    Parameters
    ----------
    matrix
        float64 ``(equations, dimensions)``.
    right
        ``(equations,)``.
    shape
        Of the unknown.
    """

    def __init__(self, matrix: Tensor, right: Tensor, shape: tuple[int, ...]) -> None:
        self._matrix, self._right, self._shape = matrix, right, shape
        gram = matrix.T @ matrix
        self._size = float(gram.diagonal().mean()) or 1.0
        self._gram = gram / self._size
        self._ridge = RIDGE * float(self._gram.diagonal().max())

    def solve(self, start: Tensor | None = None) -> tuple[Solution, float]:
        """Return the solution nearest to ``start`` or zero, and the share that is left open.

        Nearest to about a thousandth, since a ridge holds the open directions against rounding.

        Open is a direction whose singular value is below a millionth of the largest column's norm.
        """
        factor = self._factor(self._gram)
        value = torch.zeros(self._gram.shape[0], dtype=self._gram.dtype)
        if start is not None:
            value = start.flatten()
        for _ in range(_REFINED):
            left = self._matrix.T @ (self._right - self._matrix @ value) / self._size
            value = value + torch.cholesky_solve(left[:, None], factor)[:, 0]
        unit = torch.eye(len(factor), dtype=factor.dtype)
        # The inverse of the whole would take three times as long for its diagonal alone.
        inverse = torch.linalg.solve_triangular(factor, unit, upper=False).square().sum(0)
        errors = (inverse / self._size).sqrt().view(self._shape)
        return replace(self._solution(value, 1), errors=errors), self._ridge * float(inverse.mean())

    def completed(
        self,
        start: Tensor,
        limits: Limits,
        *,
        variation: bool,
        due: Callable[[], None] = lambda: None,
    ) -> Solution:
        """Choose among the solutions where equations leave gaps: within limits, and smooth.

        Every round solves the equations, those limits that the last value broke, as equations,
        and with ``variation`` the total variation, as weighted squares of differences (reweighted
        least squares, its weight falling from round to round). What nothing speaks of stays where
        it was. The last rounds are without variation.

        Parameters
        ----------
        start
            A solution, ``(1, C, H, W)`` where ``variation``.
        due
            Called between rounds; raises where the time is over.
        """
        value, taken = start.flatten(), 0
        known = self._matrix.T @ self._right / self._size
        low = limits.low.expand(self._shape).flatten()
        high = limits.high.expand(self._shape).flatten()
        for weight in (*(VARIATIONS if variation else ()), *[0.0] * _ROUNDS):
            due()
            broken = self._broken(value, low, high, limits)
            if broken is None and not weight and taken:
                break
            gram, right = self._gram.clone(), known + self._ridge * value
            if broken is not None:
                beyond, bound, rows, most = broken
                beyond, rows, most = beyond * _HELD, rows * _HELD**0.5, most * _HELD**0.5
                gram.diagonal().add_(beyond)
                right = right + beyond * bound
                if len(rows):
                    gram.addmm_(rows.T, rows)
                    right = right + rows.T @ most
            if weight:
                _add_variation(gram, value.view(self._shape), weight)
            value = torch.cholesky_solve(right[:, None], self._factor(gram))[:, 0]
            taken += 1
        return self._solution(value, taken)

    def _factor(self, gram: Tensor) -> Tensor:
        held = gram.clone()
        held.diagonal().add_(self._ridge)
        factor: Tensor = torch.linalg.cholesky(held)
        return factor

    def _solution(self, value: Tensor, steps: int) -> Solution:
        left = self._right - self._matrix @ value
        relative = float(left.norm() / self._right.norm().clamp_min(1e-300))
        return Solution(value.view(self._shape), relative, steps)

    def _broken(
        self, value: Tensor, low: Tensor, high: Tensor, limits: Limits
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return broken bounds, as 0 and 1, where those are, and rows that are too high."""
        slack = _BROKEN * float(value.abs().max())
        below, above = value < low - slack, value > high + slack
        bound = torch.where(below, low, torch.where(above, high, torch.zeros_like(value)))
        rows, most = self._matrix[:0], self._right[:0]
        if limits.matrix is not None and limits.most is not None:
            reached = limits.matrix @ value
            high_rows = reached > limits.most + _BROKEN * float(reached.abs().max())
            rows, most = limits.matrix[high_rows], limits.most[high_rows]
        beyond = (below | above).to(value)
        return (beyond, bound, rows, most) if bool(beyond.any()) or len(rows) else None


VARIATIONS = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 1e-6)
"""Weights of total variation, relative to equations whose columns have a mean squared norm of 1."""

RIDGE = 1e-12
_TOGETHER = 256
_REFINED = 3
_ROUNDS = 12
_HELD = 0.01
_SHARPEST = 1e-2
_BROKEN = 1e-6


def _add_variation(gram: Tensor, value: Tensor, weight: float) -> None:
    """Add weighted squares of neighbours' differences to a quadratic form, in place."""
    across, down = value.diff(dim=-1), value.diff(dim=-2)
    size = torch.zeros_like(value)
    size[..., :, :-1] += across.square()
    size[..., :-1, :] += down.square()
    scale = weight / (size.sum(dim=-3, keepdim=True) + _SHARPEST**2).sqrt()
    places = torch.arange(value.numel()).view(value.shape)
    full = scale.expand(value.shape)
    for one, other, share in (
        (places[..., :, :-1], places[..., :, 1:], full[..., :, :-1]),
        (places[..., :-1, :], places[..., 1:, :], full[..., :-1, :]),
    ):
        i, j, w = one.flatten(), other.flatten(), share.flatten()
        for row, column, sign in ((i, i, 1.0), (j, j, 1.0), (i, j, -1.0), (j, i, -1.0)):
            gram.index_put_((row, column), sign * w, accumulate=True)
