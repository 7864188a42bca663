"""The map from a gradient to Guardian's delta, coordinate by coordinate, and its inverses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bract.defenses import Guardian

UNIT = 2.0**-24
"""Unit roundoff of float32, in which clients compute."""

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_SMALLEST = 1e-14
_POINTS = 6001
_HALVINGS = 60


@dataclass(frozen=True)
class Path:
    """All that couples the coordinates in one run of the optimizer.

    Attributes
    ----------
    steps
        ``(a, c, p, q)`` a step: it descends along ``a g + c delta``, then ``p g`` is added to keep
        the cosine, then everything is multiplied by ``q`` to keep the bound.
    norm, length
        ``|g|`` and ``|delta|`` at the end.
    """

    steps: tuple[tuple[float, float, float, float], ...]
    norm: float
    length: float

    def apart(self, other: Path) -> float:
        """Largest relative difference of two paths' scalars."""
        mine, others = (
            torch.tensor([*p.steps, (p.norm, p.length, 0.0, 0.0)], dtype=torch.float64)
            for p in (self, other)
        )
        size = torch.maximum(mine.abs(), others.abs()).amax(dim=0)
        return float(((mine - others).abs() / size.clamp_min(1e-300)).max())


@dataclass(frozen=True)
class Image:
    """Delta, its derivative by g, and a bound on a float32 client's rounding, each ``(D,)``."""

    value: Tensor
    slope: Tensor
    rounding: Tensor


def walk(g: Tensor, hyper: Guardian, epsilon: float, each: float = 1.0) -> tuple[Tensor, Path]:
    """Run the client's optimizer on one vector ``(D,)`` in float64; g must not be zero.

    Parameters
    ----------
    each
        For how many coordinates each one stands, where g is a sample: its scalars are then
        estimates.

    Returns
    -------
    tuple
        Delta before its length is restored, and the path.
    """
    size = math.sqrt(each) * float(g.norm())
    delta, m, v = g.clone(), torch.zeros_like(g), torch.zeros_like(g)
    s, n = size * size, size
    steps = []
    for k in range(1, hyper.iterations + 1):
        a = -_sign(epsilon * size - s) + hyper.beta * _sign(s) / (size * n) if n else -1.0
        c = -hyper.beta * abs(s) / (size * n**3) if n else 0.0
        slope = a * g + c * delta
        if hyper.optimizer == "adam":
            m = _BETA1 * m + (1.0 - _BETA1) * slope
            v = _BETA2 * v + (1.0 - _BETA2) * slope.square()
            rate, eps = _rate(hyper, k)
            delta = delta - rate * m / (v.sqrt() + eps)
        else:
            delta = delta - hyper.lr * slope
        s, n = each * float(g.dot(delta)), math.sqrt(each) * float(delta.norm())
        p, q = 0.0, 1.0
        if s < hyper.min_cosine * size * n:
            across = math.sqrt(max(n * n - (s / size) ** 2, 0.0))
            along = across * hyper.min_cosine / math.sqrt(1.0 - hyper.min_cosine**2)
            p = (along - s / size) / size
            delta = delta + p * g
            s, n = along * size, math.hypot(across, along)
        if n > epsilon:
            q = epsilon / n
            delta = delta * q
            s, n = s * q, epsilon
        steps.append((a, c, p, q))
    return delta, Path(tuple(steps), size, n)


class GuardianMap:
    """Map one coordinate of g to delta, given the scalars that couple it to the others.

    The loss depends on delta through ``g . delta`` and ``|delta|`` alone, so every step moves
    along ``a g + c delta`` with two scalars, and Adam divides coordinate by coordinate: delta is
    one odd function of g in every coordinate. Near zero it jumps, since Adam's first step is
    ``lr sign(g)``; its branches between turning points are tabulated and inverted one by one.
    """

    def __init__(self, hyper: Guardian, path: Path) -> None:
        self.hyper = hyper
        self.path = path

    def __call__(self, g: Tensor) -> Image:
        """Evaluate at g ``(D,)``, float64."""
        zero = torch.zeros_like(g)
        delta, d_slope, d_error = g, torch.ones_like(g), zero
        m, m_slope, m_error = zero, zero, zero
        v, v_slope, v_error = zero, zero, zero
        for k, (a, c, p, q) in enumerate(self.path.steps, 1):
            step = a * g + c * delta
            slope = a + c * d_slope
            error = abs(c) * d_error + 6.0 * UNIT * (abs(a) * g.abs() + abs(c) * delta.abs())
            if self.hyper.optimizer == "adam":
                rate, eps = _rate(self.hyper, k)
                m = _BETA1 * m + (1.0 - _BETA1) * step
                m_slope = _BETA1 * m_slope + (1.0 - _BETA1) * slope
                m_error = _BETA1 * m_error + (1.0 - _BETA1) * error + 2.0 * UNIT * m.abs()
                v = _BETA2 * v + (1.0 - _BETA2) * step.square()
                v_slope = _BETA2 * v_slope + 2.0 * (1.0 - _BETA2) * step * slope
                v_error = (
                    _BETA2 * v_error
                    + 2.0 * (1.0 - _BETA2) * (step.abs() + error) * error
                    + 3.0 * UNIT * v
                )
                root = v.sqrt()
                safe = root.clamp_min(1e-150)
                below = root + eps
                r_slope, r_error = v_slope / (2.0 * safe), v_error / (2.0 * safe)
                move = rate * m / below
                move_slope = rate * m_slope / below - move * r_slope / below
                move_error = (rate * m_error + move.abs() * r_error) / below
                move_error = move_error + 4.0 * UNIT * move.abs()
            else:
                move, move_slope = self.hyper.lr * step, self.hyper.lr * slope
                move_error = self.hyper.lr * error + 2.0 * UNIT * move.abs()
            delta = (delta - move + p * g) * q
            d_slope = (d_slope - move_slope + p) * q
            d_error = (d_error + move_error) * q + 4.0 * UNIT * delta.abs()
        return Image(delta, d_slope, d_error)

    def inverses(
        self,
        delta: Tensor,
        slack: Tensor | float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Every g that becomes delta ``(D,)``: ``(branches, D)``, NaN where a branch has none.

        A coordinate that is exactly zero comes from zero. One that misses a turning point by no
        more than ``slack`` comes from there. ``check`` is called between steps, to break off by
        raising.
        """
        ends, x, y = self._branches(delta.device)
        allowed = torch.as_tensor(slack, dtype=torch.float64, device=delta.device)
        allowed = allowed.expand_as(delta)
        found = [
            sign * self._invert(x[low : high + 1], y[low : high + 1], sign * delta, allowed, check)
            for sign in (1.0, -1.0)
            for low, high in ends
        ]
        inverses = torch.stack(found)
        nothing = torch.full_like(inverses, torch.nan)
        nothing[0] = 0.0
        return torch.where(delta == 0, nothing, inverses)

    @property
    def turning(self) -> float:
        """Largest ``|delta|`` of a branch that is not the outermost; one g explains more."""
        ends, _, y = self._branches(torch.device("cpu"))
        sizes = y.abs()
        inner = [float(sizes[at]) for low, high in ends[:-1] for at in (low, high)]
        return max([*inner, float(sizes[ends[-1][0]])])

    def _branches(self, device: torch.device) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
        """Ends of the monotone branches for positive g, in a table of g and delta."""
        top = math.log10(self.path.norm * 1.01)
        bottom = math.log10(_SMALLEST) + min(0.0, top)
        x = torch.logspace(bottom, top, _POINTS, dtype=torch.float64).to(device)
        y = self(x).value
        rise = (y[1:] - y[:-1]).sign()
        turns = (rise[1:] * rise[:-1] < 0).nonzero().flatten() + 1
        if len(turns):
            low, high = x[turns - 1], x[turns + 1]
            rising = rise[turns - 1]
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                before = self(middle).slope * rising > 0
                low, high = torch.where(before, middle, low), torch.where(before, high, middle)
            x[turns] = 0.5 * (low + high)
            y[turns] = self(x[turns]).value
        marks = [0, *turns.tolist(), _POINTS - 1]
        return [(i, j) for i, j in pairwise(marks) if j > i], x, y

    def _invert(
        self, x: Tensor, y: Tensor, wanted: Tensor, slack: Tensor, check: Callable[[], None]
    ) -> Tensor:
        """Invert one monotone branch by Newton steps that fall back on bisection."""
        if float(y[-1]) < float(y[0]):
            x, y = x.flip(0), y.flip(0)
        inside = ((wanted >= y[0] - slack) & (wanted <= y[-1] + slack)).nonzero().flatten()
        result = torch.full_like(wanted, torch.nan)
        if not len(inside):
            return result
        target = wanted[inside].clamp(float(y[0]), float(y[-1]))
        right = torch.searchsorted(y, target).clamp(1, len(y) - 1)
        low, high = x[right - 1], x[right]
        share = (target - y[right - 1]) / (y[right] - y[right - 1]).clamp_min(1e-300)
        g = low + share * (high - low)
        active = torch.arange(len(g), device=g.device)
        for _ in range(_HALVINGS):
            check()
            here, goal = g[active], target[active]
            at = self(here)
            under = at.value < goal
            low[active] = torch.where(under, here, low[active])
            high[active] = torch.where(under, high[active], here)
            better = here + (goal - at.value) / at.slope
            inner = torch.minimum(low[active], high[active])
            outer = torch.maximum(low[active], high[active])
            fits = (better >= inner) & (better <= outer)
            better = torch.where(fits, better, 0.5 * (inner + outer))
            g[active] = better
            active = active[(better - here).abs() > 1e-12 * here.abs()]
            if not len(active):
                break
        result[inside] = g
        return result


def _rate(hyper: Guardian, k: int) -> tuple[float, float]:
    """Adam's step size and epsilon at step k, with both bias corrections taken in."""
    correction = math.sqrt(1.0 - _BETA2**k)
    return hyper.lr * correction / (1.0 - _BETA1**k), _EPS * correction


def _sign(value: float) -> float:
    return math.copysign(1.0, value) if value else 0.0
