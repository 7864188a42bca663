"""Image priors, one number a trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from bract.attacks.problem.problem import Problem
from bract.attacks.problem.returned_buffers import (
    KINDS,
    impossible_statistics,
    running_statistics,
)
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.solve.local_statistics import local_statistics, simulated_statistics
from bract.captures.observation import Observation

MEAN_DIFFERENCE = 0.04
"""Mean absolute difference of neighbouring pixels in [0, 1]: 0.049 over 100 training digits, 0.033
over 60 crops of the photographs on which settings are chosen, at 32 x 32."""

ROOT_MEAN_SQUARE_DIFFERENCE = 0.07
"""Root of the mean squared difference of the same: 0.074 and 0.064."""


class Prior(Protocol):
    """A penalty on candidate images."""

    def component(self, problem: Problem) -> str | None:
        """Name for a record of what ran; None where it has no effect on this problem."""

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``(L,)`` for images ``(L, B, C, H, W)`` in [0, 1]; lower is more plausible."""


def image_priors(*, tv: float, power: int, bn: float) -> list[Prior]:
    """The priors whose weights are not zero."""
    priors: list[Prior] = []
    if tv:
        priors.append(TotalVariation(weight=tv, power=power))
    if bn:
        priors.append(BatchNormStatistics(weight=bn))
    return priors


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    """Mean absolute (or squared) difference of neighbouring pixels, rows plus columns.

    Attributes
    ----------
    weight
        Factor before the penalty.
    power
        1 as in IG, 2 as in GRNN's published code.
    """

    weight: float
    power: int = 1

    def component(self, problem: Problem) -> str | None:
        """Total variation applies to every problem."""
        del problem
        return "total variation"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * (mean |dx|^power + mean |dy|^power)``."""
        del problem
        down = images[..., 1:, :] - images[..., :-1, :]
        right = images[..., :, 1:] - images[..., :, :-1]
        if self.power == 1:
            down, right = down.abs(), right.abs()
        else:
            down, right = down.abs() ** self.power, right.abs() ** self.power
        # A signal has one row, and a row of a table one value: no neighbours in that direction.
        parts = [part.flatten(1).mean(dim=1) for part in (down, right) if part.numel()]
        return self.weight * sum(parts, images.new_zeros(len(images)))


@dataclass(frozen=True, kw_only=True)
class NaturalImages:
    """``-log p(images)`` in nats, up to a constant: total variation at its likeliest scale.

    With power 1 ``p(x)`` is proportional to ``exp(-beta TV(x))``, with TV(x) the sum of absolute
    differences of neighbouring pixels over rows and columns. It leaves the level of each of the
    planes (one an image and channel) open, and scales with the d = H W - 1 values a plane that are
    left, so its normalisation is beta^-d, and ``beta = d / TV`` is likeliest for images of which
    the mean is TV: with n = (H - 1) W + H (W - 1) differences a plane of mean size
    `MEAN_DIFFERENCE`, ``beta = (d / n) / MEAN_DIFFERENCE``. With power 2 it is
    ``exp(-gamma TV2(x))`` with squared differences, the normalisation gamma^(-d / 2), and
    ``gamma = (d / n) / (2 ROOT_MEAN_SQUARE_DIFFERENCE^2)``.

    With noise of deviation sigma, whose likelihood is ``|u - m|^2 / (2 sigma^2)``, this is a loss
    ``|u - m|^2 + weight * TV`` with weight ``2 sigma^2 beta``: it follows from the noise.

    Attributes
    ----------
    power
        1 or 2, as in the attack's own total variation.
    """

    power: int = 1

    def component(self, problem: Problem) -> str | None:
        """The prior applies to every problem."""
        del problem
        return "total variation in nats"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return nats ``(L,)``."""
        if 1 in images.shape[-2:]:
            return images.new_zeros(len(images))  # of a signal or a row, which are no pictures
        return TotalVariation(weight=self.weight(images), power=self.power)(problem, images)

    def weight(self, images: Tensor) -> float:
        """Return what multiplies `TotalVariation`, means down and right, of ``(L, B, C, H, W)``.

        Of images that are not square both means count as many differences, half of all.
        """
        height, width = images.shape[-2:]
        differences = (height - 1) * width + height * (width - 1)
        free = (height * width - 1) / differences
        count = free * (images[0].numel() // (height * width)) * differences / 2.0
        if self.power == 1:
            return count / MEAN_DIFFERENCE
        return count / (2.0 * ROOT_MEAN_SQUARE_DIFFERENCE**2)


def natural_images(priors: Sequence[Prior]) -> Prior:
    """Return the prior in nats that replaces an attack's own.

    That is its own where it has one in nats (`LatentPrior`), else `NaturalImages` of its total
    variation's power.
    """
    latent = next((prior for prior in priors if isinstance(prior, LatentPrior)), None)
    if latent is not None:
        return replace(latent, kind="normal", weight=1.0)
    own = [prior.power for prior in priors if isinstance(prior, TotalVariation)]
    return NaturalImages(power=own[0] if own else 1)


@dataclass(frozen=True, kw_only=True)
class LatentPrior:
    """How plausible the latents are from which a trained generator makes the images.

    Attributes
    ----------
    latent
        The latents ``(L, B, n)``, a leaf that a search moves.
    weight
        Factor before the penalty.
    kind
        ``normal``: ``|z|^2 / 2``, which is ``-log p(z)`` in nats up to a constant. ``divergence``:
        of the normal with the mean m and variance v of the n values from N(0, 1),
        ``(m^2 + v - log v - 1) / 2`` (Li et al. 2022, their code; it leaves single values free).
    """

    latent: Tensor
    weight: float
    kind: Literal["normal", "divergence"] = "divergence"

    def component(self, problem: Problem) -> str | None:
        """The prior applies to every problem."""
        del problem
        return "latent prior in nats" if self.kind == "normal" else "latent prior"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return the penalty, summed over the images of each trial."""
        del problem, images
        if self.kind == "normal":
            return 0.5 * self.weight * self.latent.square().flatten(1).sum(dim=1)
        mean, variance = self.latent.mean(dim=2), self.latent.var(dim=2, unbiased=False)
        apart = mean.square() + variance - (variance + 1e-10).log() - 1.0
        return 0.5 * self.weight * apart.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """Distance of the candidates' batch statistics to those the model holds.

    Where the client normalised by its batch (norm_mode ``train``) and sent its buffers back, the
    own mean and variance of its batches follow from the running ones before and after: exactly of
    one step, as a weighted mean of several (`bract.attacks.solve.local_statistics`). Otherwise the
    running statistics are used (GradInversion, Yin et al. 2021, eq. 8). Models without batch
    normalisation are left alone.

    Attributes
    ----------
    weight
        Factor before the mean over layers of the relative squared distances.
    """

    weight: float

    def component(self, problem: Problem) -> str | None:
        """Nothing to match in a model without batch normalisation."""
        first = problem.cases[0]
        known, _ = known_statistics(first.observation, first.target_model)
        return "batch statistics" if known else None

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * mean_l(|mu - mu_l|^2 + |var - var_l|^2) / (|mu_l|^2 + |var_l|^2)``."""
        own = [local_statistics(case.observation, case.target_model) for case in problem.cases]
        known = [one for one in own if one is not None]
        if len(known) == len(own):
            wanted = [one.layers for one in known]
            seen = simulated_statistics(problem, images, known)
        else:
            wanted = [known_statistics(c.observation, c.target_model)[0] for c in problem.cases]
            if not wanted[0]:
                return images.new_zeros(len(images))
            seen = problem.target_model.batch_statistics(
                problem.parameters, problem.state, problem.target_model.normalise(images)
            )
        total = images.new_zeros(len(images))
        for name in wanted[0]:
            mean, variance = (
                torch.stack([statistics[name][i] for statistics in wanted]).to(images)
                for i in range(2)
            )
            distance = (seen[name][0] - mean).square() + (seen[name][1] - variance).square()
            size = (mean.square() + variance.square()).sum(dim=1).clamp_min(1e-12)
            total = total + distance.sum(dim=1) / size
        return self.weight * total / len(wanted[0])


def known_statistics(
    observation: Observation, target_model: TargetModel
) -> tuple[dict[str, tuple[Tensor, Tensor]], bool]:
    """Mean and unbiased variance of each batch norm's input, as far as the capture holds them.

    Returns
    -------
    tuple of dict and bool
        By layer; and whether they are the batch's own, all of them, rather than running ones.
        Returned statistics that are none (`impossible_statistics`) are taken for not returned.
    """
    believed = observation.declaration.norm_mode == "train"
    believed = believed and impossible_statistics(observation, target_model) is None
    found, own = {}, True
    for name, layer in running_statistics(observation, target_model).items():
        if any(kind not in layer.sent for kind in KINDS):
            continue
        batch = layer.of_batches() if believed and layer.steps == 1 else None
        own = own and batch is not None
        found[name] = batch or (layer.sent["running_mean"], layer.sent["running_var"])
    return found, own and bool(found)
