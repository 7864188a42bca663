"""Statistics of a client's own batches, as a loss of candidate images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.problem.problem import Problem
from bract.attacks.problem.returned_buffers import observed_share
from bract.attacks.solve.local_statistics import (
    LocalStatistics,
    local_statistics,
    simulated_statistics,
)

_ROUNDING = 2.0**-23
"""Relative spacing of float32, in which buffers travel."""

DECISIVE = 3
"""Most pixels a statistic that can decide between images. Chosen on images that no benchmark
scores: through a fresh ResNet-20 one colour image of 32 pixels (2.2 pixels a statistic) is rebuilt
at 19 dB where IG reaches 10; four of them (8.9), matched as well, do not, nor does a digit of 16
pixels through three layers of 12 channels (3.6)."""


@dataclass(frozen=True)
class OwnStatistics:
    """Mean and variance of every channel that enters a normalisation layer, as clients had them.

    Of one local step those of the client's batch; of several the mean over steps that
    `LocalStatistics` has.

    Attributes
    ----------
    layers
        By name of the layer, means, variances and the variance that errors are measured by, each
        ``(L, channels)``.
    known
        Statistics that each trial's buffers give.
    """

    layers: dict[str, tuple[Tensor, Tensor, Tensor]]
    known: tuple[LocalStatistics, ...]

    @classmethod
    def of(cls, problem: Problem) -> OwnStatistics | None:
        """Return the statistics of the captures; None where one has none of its own steps."""
        found = [local_statistics(c.observation, c.target_model) for c in problem.cases]
        known = tuple(own for own in found if own is not None)
        if len(known) < len(found):
            return None
        layers = {}
        for name in known[0].layers:
            mean, variance = (
                torch.stack([own.layers[name][i] for own in known]).to(
                    problem.device, problem.dtype
                )
                for i in range(2)
            )
            # The steps' share of a running statistic is less than one: rounding grows by that.
            rounding = torch.stack(
                [
                    c.observation.returned_buffers[f"{name}.running_var"].abs()
                    / observed_share(own.momenta[name], own.steps)
                    for c, own in zip(problem.cases, known, strict=True)
                ]
            ).to(variance)
            scale = variance.clamp_min(0.0) + _ROUNDING * rounding
            tiny = torch.finfo(variance.dtype).tiny
            layers[name] = (mean, variance, scale.clamp_min(tiny**0.25))
        return cls(layers, known)

    def of_trial(self, trial: int) -> OwnStatistics:
        """Return those of one trial."""
        layers = {
            name: (mean[trial : trial + 1], variance[trial : trial + 1], scale[trial : trial + 1])
            for name, (mean, variance, scale) in self.layers.items()
        }
        return OwnStatistics(layers, self.known[trial : trial + 1])

    def decisive(self, *, pixels: int) -> bool:
        """Return whether there are enough statistics to decide which image is nearer.

        Parameters
        ----------
        pixels
            Unknown values ``B * C * H * W`` of one trial.
        """
        known = sum(mean.shape[1] + scale.shape[1] for mean, _, scale in self.layers.values())
        return known * DECISIVE >= pixels

    def error(self, problem: Problem, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return how far candidates' statistics are from the clients', relatively, ``(L,)``.

        The mean over layers of ``mean_c((mu - mu_c)^2 / var_c + (var - var_c)^2 / var_c^2)``; 0 is
        a perfect match. Variances below the rounding of the buffers do not count.

        Parameters
        ----------
        images
            ``(L, B, C, H, W)`` in [0, 1].
        labels
            ``(L, B, classes)`` probabilities, by which unrolled steps are simulated; without them
            several steps are simulated to first order.
        """
        return self.apart(simulated_statistics(problem, images, self.known, labels))

    def apart(self, seen: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Return the error of means and unbiased variances of some layers, ``(L,)``, as `error`."""
        layers = []
        for name, (of, square) in seen.items():
            mean, variance, scale = self.layers[name]
            of_mean = (of - mean).square() / scale
            of_variance = ((square - variance) / scale).square()
            layers.append((of_mean + of_variance).mean(dim=1))
        return torch.stack(layers).mean(dim=0)
