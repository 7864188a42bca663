"""Priors of GradInversion beside those of the core: the norm, and a client's own statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bract.attacks import Problem
from bract.attacks.solve.own_statistics import OwnStatistics


@dataclass(frozen=True, kw_only=True)
class SquaredNorm:
    """Mean square of the pixels as the model sees them: 0 is the mean that clients subtract.

    Attributes
    ----------
    weight
        Factor before the penalty.
    """

    weight: float

    def component(self, problem: Problem) -> str | None:
        """The norm applies to every problem."""
        del problem
        return "squared norm"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * mean z^2`` for normalised pixels z."""
        inputs = problem.target_model.normalise(images)
        return self.weight * inputs.square().flatten(1).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class OwnBatchStatistics:
    """`OwnStatistics.error` as a prior added to a gradient.

    Attributes
    ----------
    weight
        Factor before the error.
    own
        The statistics of the same trials.
    labels
        ``(L, B, classes)`` probabilities.
    """

    weight: float
    own: OwnStatistics
    labels: Tensor

    def component(self, problem: Problem) -> str | None:
        """Known for every trial, or there is no such prior."""
        del problem
        return "batch statistics"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * error``, ``(L,)``."""
        return self.weight * self.own.error(problem, images, self.labels)


def have_run(problem: Problem) -> bool:
    """Return whether running statistics were sent that counted a batch in every case.

    A fresh network's are 0 and 1, which do not depend on images.
    """
    return all(
        any(
            name.endswith(".num_batches_tracked") and int(count) > 0
            for name, count in case.observation.buffers.items()
        )
        for case in problem.cases
    )
