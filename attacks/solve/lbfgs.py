"""L-BFGS on many trials at once, each with its own line search."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from bract.attacks.solve.optimizers import BatchedOptimizer, Evaluate
from bract.updates.update import Tensors

_ARMIJO = 1e-4
_WOLFE = 0.9
_CURVATURE = 1e-12
_FIRST_STEP = 0.01
"""Largest change of a coordinate in a step without curvature information."""


class BatchedLBFGS(BatchedOptimizer):
    """Limited-memory BFGS (Nocedal and Wright, algorithm 7.5), vectorised over trials.

    One step is one direction. With the line search, bisection finds a point that satisfies the
    weak Wolfe conditions in every trial; a trial that finds none stays where it is and forgets its
    history. Without it, trials take the full step scaled by ``lr``, like `torch.optim.LBFGS`,
    which DLG's published code uses.

    Parameters
    ----------
    variables
        Leaves ``(L, ...)``, changed in place.
    history
        Pairs of steps and gradient changes that are kept.
    evaluations
        Most evaluations in one line search.
    """

    components: ClassVar[tuple[str, ...]] = ("quasi-Newton",)

    def __init__(
        self,
        variables: Tensors,
        *,
        history: int = 20,
        line_search: bool = True,
        lr: float = 1.0,
        evaluations: int = 12,
    ) -> None:
        self._variables = list(variables.values())
        self._line_search = line_search
        self._lr = lr
        self._evaluations = evaluations
        point = self._read()
        trials, size = point.shape
        self._steps = point.new_zeros(trials, history, size)
        self._changes = point.new_zeros(trials, history, size)
        self._inverse = point.new_zeros(trials, history)
        self._loss: Tensor | None = None
        self._gradient = torch.zeros_like(point)

    def step(self, evaluate: Evaluate, progress: float) -> None:
        """Find a direction, then a point on it."""
        del progress
        if self._loss is None:
            self._loss, self._gradient = self._evaluate(evaluate)
        start, loss, gradient = self._read(), self._loss, self._gradient
        direction = -self._apply_inverse_hessian(gradient)
        slope = (gradient * direction).sum(dim=1)
        uphill = ~(slope < 0)
        direction = torch.where(uphill[:, None], -gradient, direction)
        slope = torch.where(uphill, -gradient.square().sum(dim=1), slope)
        fresh = uphill | (self._inverse == 0).all(dim=1)
        if self._line_search:
            first = _FIRST_STEP / direction.abs().amax(dim=1).clamp_min(
                torch.finfo(direction.dtype).tiny
            )
        else:
            first = (1.0 / gradient.abs().sum(dim=1).clamp_min(1e-30)).clamp_max(1.0)
        length = torch.where(fresh, first, 1.0).to(start.dtype)
        if self._line_search:
            point, loss, found = self._search(evaluate, start, direction, slope, length)
        else:
            point = start + (self._lr * length)[:, None] * direction
            self._write(point)
            loss, found = self._evaluate(evaluate)
        self._remember(point - start, found - gradient)
        self._loss, self._gradient = loss, found

    def _search(
        self, evaluate: Evaluate, start: Tensor, direction: Tensor, slope: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._loss is None:
            raise AssertionError("step evaluates first")
        best, best_loss, best_gradient = start, self._loss, self._gradient
        low = torch.zeros_like(length)
        high = torch.full_like(length, float("inf"))
        done = torch.zeros_like(length, dtype=torch.bool)
        for _ in range(self._evaluations):
            point = torch.where(done[:, None], best, start + length[:, None] * direction)
            self._write(point)
            loss, gradient = self._evaluate(evaluate)
            falls = loss <= self._loss + _ARMIJO * length * slope
            flat = (gradient * direction).sum(dim=1) >= _WOLFE * slope
            take = falls & ~done & (loss <= best_loss)
            best = torch.where(take[:, None], point, best)
            best_loss = torch.where(take, loss, best_loss)
            best_gradient = torch.where(take[:, None], gradient, best_gradient)
            high = torch.where(~falls & ~done, length, high)
            low = torch.where(falls & ~flat & ~done, length, low)
            done = done | (falls & flat)
            if bool(done.all()):
                break
            length = torch.where(high.isinf(), 2.0 * length, 0.5 * (low + high))
        stuck = (best == start).all(dim=1)
        self._inverse = torch.where(stuck[:, None], 0.0, self._inverse)
        self._write(best)
        return best, best_loss, best_gradient

    def _apply_inverse_hessian(self, gradient: Tensor) -> Tensor:
        result = gradient.clone()
        shares = []
        count = self._inverse.shape[1]
        for i in reversed(range(count)):
            share = self._inverse[:, i] * (self._steps[:, i] * result).sum(dim=1)
            result = result - share[:, None] * self._changes[:, i]
            shares.append(share)
        last = self._changes[:, -1].square().sum(dim=1) * self._inverse[:, -1]
        result = (
            result
            * torch.where(last > 0, 1.0 / last.clamp_min(torch.finfo(last.dtype).tiny), 1.0)[
                :, None
            ]
        )
        for i in range(count):
            share = self._inverse[:, i] * (self._changes[:, i] * result).sum(dim=1)
            result = result + (shares[count - 1 - i] - share)[:, None] * self._steps[:, i]
        return result

    def _remember(self, moved: Tensor, change: Tensor) -> None:
        product = (moved * change).sum(dim=1)
        scale = moved.norm(dim=1) * change.norm(dim=1)
        keep = (product > _CURVATURE * scale) & (product > 0)
        inverse = torch.where(keep, 1.0 / torch.where(keep, product, 1.0), 0.0)

        def push(past: Tensor, new: Tensor) -> Tensor:
            moved_on = torch.cat([past[:, 1:], new[:, None]], dim=1)
            return torch.where(keep.view(-1, *[1] * (past.dim() - 1)), moved_on, past)

        self._steps = push(self._steps, moved)
        self._changes = push(self._changes, change)
        self._inverse = push(self._inverse, inverse)

    def _evaluate(self, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
        loss = evaluate()
        gradient = torch.cat(
            [
                (torch.zeros_like(v) if v.grad is None else v.grad).flatten(1)
                for v in self._variables
            ],
            dim=1,
        )
        bad = ~(loss.isfinite() & gradient.isfinite().all(dim=1))
        loss = torch.where(bad, float("inf"), loss).to(gradient.dtype)
        return loss, torch.where(bad[:, None], 0.0, gradient)

    def _read(self) -> Tensor:
        return torch.cat([v.detach().flatten(1) for v in self._variables], dim=1)

    @torch.no_grad()
    def _write(self, point: Tensor) -> None:
        sizes = [v[0].numel() for v in self._variables]
        for variable, part in zip(self._variables, torch.split(point, sizes, dim=1), strict=True):
            variable.copy_(part.view_as(variable))

    def state(self) -> dict[str, Any]:
        """History and the current loss and gradient."""
        return {
            "steps": self._steps,
            "changes": self._changes,
            "inverse": self._inverse,
            "loss": self._loss,
            "gradient": self._gradient,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._steps, self._changes = state["steps"], state["changes"]
        self._inverse, self._loss = state["inverse"], state["loss"]
        self._gradient = state["gradient"]
