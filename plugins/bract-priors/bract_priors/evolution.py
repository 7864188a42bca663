"""Covariance matrix adaptation (CMA-ES): descent without derivatives, by the package ``cma``."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bract.attacks import Outcome, Problem
from bract.attacks.solve.optimizers import BatchedOptimizer, Evaluate


def population_of(dimension: int) -> int:
    """Candidates of a generation (Hansen 2016, table 1): ``4 + floor(3 ln n)``."""
    return 4 + math.floor(3 * math.log(dimension))


def widened(problem: Problem, population: int) -> Problem:
    """Return a problem with one trial for each candidate of a generation of each trial."""
    return problem.select([i for i in range(problem.trials) for _ in range(population)])


def narrowed(outcome: Outcome, population: int) -> Outcome:
    """Return each trial's best candidate of all generations; the inverse of `widened`."""
    losses = outcome.losses.view(-1, population)
    picks = (
        losses.argmin(dim=1) + population * torch.arange(len(losses)).to(losses.device)
    ).tolist()
    curves = []
    for trial in range(len(losses)):
        mine = outcome.curves[trial * population : (trial + 1) * population]
        curves.append([(at[0][0], min(value for _, value in at)) for at in zip(*mine, strict=True)])
    return Outcome(
        images=outcome.images[picks],
        labels=outcome.labels[picks],
        losses=outcome.losses[picks],
        unknowns={name: value[picks] for name, value in outcome.unknowns.items()},
        curves=curves,
        iterations=outcome.iterations,
        recipes=[outcome.recipes[i] for i in picks] if outcome.recipes else [],
    )


class CMAES(BatchedOptimizer):
    """CMA-ES (Hansen and Ostermeier 2001), one search a trial; a step is one generation.

    Parameters
    ----------
    variable
        Candidates ``(L * population, ...)`` of the trials, side by side, changed in place.
    start
        Means of the first generation, ``(L, ...)``.
    sigma
        Standard deviation of the first generation.
    seeds
        One a trial.
    """

    components: ClassVar[tuple[str, ...]] = ("CMA-ES",)
    derivative_free: ClassVar[bool] = True

    def __init__(self, variable: Tensor, start: Tensor, *, sigma: float, seeds: list[int]) -> None:
        self._variable, self._sigma, self._seeds = variable, sigma, seeds
        self._start = start.detach().flatten(1).to("cpu", torch.float64).numpy()
        self._population = len(variable) // len(start)
        self._losses: list[Tensor] = []
        self._begin()

    def step(self, evaluate: Evaluate, progress: float) -> None:
        """Draw a generation, evaluate it and adapt."""
        del progress
        drawn = self._ask()
        with torch.no_grad():
            values = torch.from_numpy(np.concatenate(drawn)).to(self._variable)
            self._variable.copy_(values.view_as(self._variable))
        losses = evaluate().to("cpu", torch.float64)
        losses = losses.nan_to_num(1e30, 1e30, -1e30)
        self._losses.append(losses)
        self._tell(drawn, losses)

    def state(self) -> dict[str, Any]:
        """Every loss so far: draws repeat under their seeds, so these make the search again."""
        return {"losses": list(self._losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Replay the generations."""
        self._begin()
        self._losses = list(state["losses"])
        for losses in self._losses:
            self._tell(self._ask(), losses)

    def _begin(self) -> None:
        import cma

        logging.getLogger("cma").setLevel(logging.ERROR)
        self._searches = [
            cma.CMAEvolutionStrategy(
                mean,
                self._sigma,
                {
                    "popsize": self._population,
                    # A generator of its own: the package would seed NumPy's global one.
                    "seed": math.nan,
                    "randn": np.random.RandomState(np.random.PCG64(seed)).randn,
                    "verbose": -9,
                    "verb_log": 0,
                },
            )
            for mean, seed in zip(self._start, self._seeds, strict=True)
        ]

    def _ask(self) -> list[Any]:
        return [np.stack(search.ask()) for search in self._searches]

    def _tell(self, drawn: list[Any], losses: Tensor) -> None:
        rows = losses.view(len(self._searches), -1).tolist()
        for search, points, values in zip(self._searches, drawn, rows, strict=True):
            search.tell(list(points), values)
