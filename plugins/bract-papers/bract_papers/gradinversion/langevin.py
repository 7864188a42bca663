"""Noise after each step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bract.attacks.solve.optimizers import SCHEDULES, BatchedOptimizer, Evaluate
from bract.updates.update import Tensors


class Langevin(BatchedOptimizer):
    """Another optimizer's step, then noise: ``x += deviation * lr * schedule * N(0, 1)``.

    GradInversion (Yin et al. 2021) adds it so that descent leaves poor valleys.

    Parameters
    ----------
    inner
        Takes the step; its ``project`` runs before the noise, ``project`` here after it.
    variables
        What the noise is added to, leaves ``(L, ...)``, changed in place.
    generators
        One CPU generator a trial.
    deviation, lr, schedule
        Standard deviation of the noise, as a share of the step that is named by ``lr`` and a
        schedule of `SCHEDULES`.
    """

    components = ("Langevin noise",)

    def __init__(
        self,
        inner: BatchedOptimizer,
        variables: Tensors,
        generators: list[torch.Generator],
        *,
        deviation: float,
        lr: float,
        schedule: str,
        project: Callable[[], None] | None = None,
    ) -> None:
        self._inner = inner
        self._values = list(variables.values())
        self._generators = generators
        self._step, self._schedule = deviation * lr, schedule
        self._project = project

    def step(self, evaluate: Evaluate, progress: float) -> None:
        """Move, then add each trial's own noise."""
        self._inner.step(evaluate, progress)
        deviation = self._step * SCHEDULES[self._schedule](progress)
        with torch.no_grad():
            for value in self._values:
                drawn = [torch.randn(value.shape[1:], generator=g) for g in self._generators]
                value.add_(torch.stack(drawn).to(value), alpha=deviation)
        if self._project is not None:
            self._project()

    def state(self) -> dict[str, Any]:
        """The inner optimizer's, and the state of each generator."""
        return {"inner": self._inner.state(), "noise": [g.get_state() for g in self._generators]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._inner.restore(state["inner"])
        for generator, saved in zip(self._generators, state["noise"], strict=True):
            generator.set_state(saved.cpu())
