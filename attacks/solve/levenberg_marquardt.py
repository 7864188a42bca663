"""Levenberg-Marquardt on pixels: solves the matching equations instead of descending on them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from bract.attacks.problem.problem import Problem
from bract.attacks.problem.uncompiled import Watch
from bract.process import clock
from bract.updates.update import Tensors, flatten, unflatten

SOLVED = 1e-12
"""Relative squared residual at which the captured float32 numbers are explained: their rounding
alone leaves 1e-15 to 1e-13 on the LeNets."""

_TRIES = 10
_DIRECTIONS = 128
_WORKING = 2**32
"""Bytes that the directions taken together may allocate, a part of which is held at once."""

_ROWS_PER_UNKNOWN = 2


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One trial's solution: images ``(B, C, H, W)``, unknowns, relative squared residual, curve."""

    images: Tensor
    unknowns: Tensors
    loss: float
    curve: list[tuple[int, float]]


def levenberg_marquardt(
    problem: Problem,
    images: Tensor,
    labels: Tensor,
    unknowns: Tensors,
    *,
    iterations: int,
    deadline: float | None = None,
    tolerance: float = 1e-3,
    report: Callable[[int, float], None] | None = None,
    hold_images: bool = False,
    spread: float | None = None,
) -> Fit:
    """Minimise ``|s(x) - c|^2 / |c|^2`` over pixels in [0, 1], for a problem of one trial.

    Matching is a nonlinear least-squares problem whose normal equations are far too
    ill-conditioned for first-order descent (eigenvalues span 1e5 or more on the LeNets). Each step
    solves ``(J^T J + mu I) d = -J^T r`` with pixels at a bound held there; ``mu`` falls after a
    success and rises after a failure. Rows of the Jacobian are added up with random signs into
    twice as many rows as there are pixels (a count sketch), which keeps the solution and
    saves most of the work. Where the Jacobian is not finite the search ends with what it has.

    Parameters
    ----------
    images, labels, unknowns
        Start ``(1, B, C, H, W)`` in [0, 1], label rows ``(1, B, classes)``, and the start of the
        forward model's unknowns ``(1, ...)``, which are solved for along with the pixels; float64.
    deadline
        A `clock.now` value at which to stop, in the middle of a step too.
    tolerance
        Stop when a step improves the residual by less than this, relatively.
    hold_images
        Solve for the unknowns alone.
    spread
        Deviation of the unknowns about zero, of which a penalty is made that weighs as much as the
        residual of the start where all of them are that far out: rough images are not explained by
        unlikely unknowns, and exact ones leave the penalty no weight.
    """
    layout = unknowns if hold_images else {"images": images} | unknowns
    pixels = 0 if hold_images else images.numel()
    point = _into_box(flatten(layout), pixels)
    residual = _residuals(problem, labels, layout, images)
    if spread is not None:
        residual = _penalised(residual, point, pixels, spread)
    value = residual(point)
    loss = float(value.square().sum())
    curve = [(0, loss)]
    damping: float | None = None
    together = _together(residual, point)

    def due() -> bool:
        return deadline is not None and clock.now() >= deadline

    for step in range(1, iterations + 1):
        if (made := _sketched_jacobian(residual, point, hold_images, together, due)) is None:
            break
        jacobian, value = made
        normal = jacobian.T @ jacobian
        slope = jacobian.T @ value
        if not (bool(normal.isfinite().all()) and bool(slope.isfinite().all())):
            break
        scale = float(normal.diagonal().mean())
        damping = scale * 1e-2 if damping is None else damping
        floor = scale * 1e-14
        held = ((point <= 0) & (slope > 0)) | ((point >= 1) & (slope < 0))
        held[pixels:] = False
        free = (~held).nonzero().flatten()
        before = loss
        for _ in range(_TRIES):
            move = torch.zeros_like(point)
            move[free] = _solve(normal[free][:, free], -slope[free], max(damping, floor))
            candidate = _into_box(point + move, pixels)
            found = float(residual(candidate).square().sum())
            if found < loss:
                point, loss = candidate, found
                damping /= 10.0
                break
            damping *= 10.0
        curve.append((step, loss))
        if report is not None:
            report(step, loss)
        slow = loss >= before * (1.0 - tolerance)
        if slow or (loss < SOLVED and loss > 0.5 * before):
            break
        if due():
            break
    solution = unflatten(point, layout)
    shown = solution.pop("images", images)[0]
    return Fit(images=shown, unknowns=solution, loss=loss, curve=curve)


def _into_box(point: Tensor, pixels: int) -> Tensor:
    return torch.cat([point[:pixels].clamp(0.0, 1.0), point[pixels:]])


def _residuals(
    problem: Problem, labels: Tensor, layout: Tensors, images: Tensor
) -> Callable[[Tensor], Tensor]:
    trust = {n: w.sqrt() for n, w in (problem.weights or {}).items()}
    norm = torch.cat(
        [(v * trust[n] if n in trust else v).flatten() for n, v in problem.target.items()]
    ).norm()

    def residual(point: Tensor) -> Tensor:
        unknowns = unflatten(point, layout)
        simulated = problem.simulate(unknowns.pop("images", images), labels, unknowns)
        parts = []
        for name, wanted in problem.reading(simulated).items():
            part = simulated[name] - wanted
            parts.append((part * trust[name] if name in trust else part).flatten())
        difference: Tensor = torch.cat(parts) / norm.clamp_min(1e-30)
        return difference

    return residual


def _penalised(
    residual: Callable[[Tensor], Tensor], start: Tensor, pixels: int, spread: float
) -> Callable[[Tensor], Tensor]:
    count = max(1, len(start) - pixels)
    factor = residual(start).norm() / (math.sqrt(count) * spread)
    return lambda point: torch.cat([residual(point), factor * point[pixels:]])


class _Allocated(Watch):
    """Sums the bytes of what operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            for value in made if isinstance(made, tuple | list) else (made,):
                self.total += value.nbytes if isinstance(value, Tensor) else 0
        return made


def _together(residual: Callable[[Tensor], Tensor], point: Tensor) -> int:
    """Return how many directions of the Jacobian are taken at once, by what one allocates."""
    allocated = _Allocated()
    with allocated:
        _change(residual, point, torch.ones_like(point))
    return min(_DIRECTIONS, max(1, _WORKING // max(1, allocated.total)))


def _change(residual: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Return the derivative of the residual along a direction."""
    with warnings.catch_warnings():
        # PyTorch's own forward-mode rules are compiled by an interface it deprecates.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        change: Tensor = jvp(residual, (point,), (direction,))[1]
        return change


def _sketched_jacobian(
    residual: Callable[[Tensor], Tensor],
    point: Tensor,
    whole: bool,
    together: int,
    due: Callable[[], bool],
) -> tuple[Tensor, Tensor] | None:
    """Return the Jacobian, its rows added up at random, and the residual; None once it is due."""
    value = residual(point)
    rows, unknowns = len(value), len(point)
    kept = rows if whole else min(rows, _ROWS_PER_UNKNOWN * unknowns)
    generator = torch.Generator().manual_seed(0)
    bucket = torch.randint(kept, (rows,), generator=generator).to(point.device)
    sign = (torch.randint(2, (rows,), generator=generator) * 2 - 1).to(point)

    def sketch(vector: Tensor) -> Tensor:
        if kept == rows:
            return vector
        return vector.new_zeros(kept).index_add(0, bucket, vector * sign)

    def column(direction: Tensor) -> Tensor:
        return sketch(_change(residual, point, direction))

    basis = torch.eye(unknowns, dtype=point.dtype, device=point.device)
    columns: list[Tensor] = []
    for part in torch.split(basis, together):
        if columns and due():
            return None
        columns.append(vmap(column)(part))
    return torch.cat(columns).T.contiguous(), sketch(value)


def _solve(normal: Tensor, right: Tensor, damping: float) -> Tensor:
    damped = normal + damping * torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        solution: Tensor = torch.linalg.lstsq(damped, right[:, None]).solution
    else:
        solution = torch.cholesky_solve(right[:, None], factor)
    return solution[:, 0]
