"""What an attacker believes about images before any gradient, one number a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bract.attacks.problem import Problem
from bract.attacks.simulation import ORDERS
from bract.attacks.victim import Victim
from bract.observation import Observation


class Prior(Protocol):
    """A penalty on candidate images."""

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

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * (mean |dx|^power + mean |dy|^power)``."""
        del problem
        down = images[..., 1:, :] - images[..., :-1, :]
        right = images[..., :, 1:] - images[..., :, :-1]
        if self.power == 1:
            down, right = down.abs(), right.abs()
        else:
            down, right = down.abs() ** self.power, right.abs() ** self.power
        return self.weight * (down.flatten(1).mean(dim=1) + right.flatten(1).mean(dim=1))


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """Squared distance of pixels to [0, 1], for searches that are not boxed."""

    weight: float

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * mean(distance^2)``."""
        del problem
        outside = (images - images.clamp(0.0, 1.0)).square()
        return self.weight * outside.flatten(1).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """Distance of the candidates' batch statistics to those the model holds.

    Where the client normalised by its batch (norm_mode ``train``), took one step and sent its
    buffers back, the batch's own mean and variance follow exactly from the running ones before
    and after. Otherwise the running statistics stand in (GradInversion, Yin et al. 2021, eq. 8).
    Models without batch normalisation are left alone.

    Attributes
    ----------
    weight
        Factor before the mean over layers of the relative squared distances.
    """

    weight: float

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return ``weight * mean_l(|mu - mu_l|^2 + |var - var_l|^2) / (|mu_l|^2 + |var_l|^2)``."""
        wanted = [known_statistics(case.observation, case.victim)[0] for case in problem.cases]
        if not wanted[0]:
            return images.new_zeros(len(images))
        held = {n: v for n, v in problem.buffers.items() if n != ORDERS}
        seen = problem.victim.batch_statistics(
            problem.parameters, held, problem.victim.normalise(images)
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
    observation: Observation, victim: Victim
) -> tuple[dict[str, tuple[Tensor, Tensor]], bool]:
    """Mean and unbiased variance of each batch norm's input, as far as the capture tells.

    Returns
    -------
    tuple of dict and bool
        By layer; and whether they are the batch's own, all of them, rather than running ones.
    """
    sent, returned = observation.buffers, observation.returned_buffers
    found, own = {}, True
    for name, module in victim.model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        mean, variance = sent.get(f"{name}.running_mean"), sent.get(f"{name}.running_var")
        if mean is None or variance is None:
            continue
        count = f"{name}.num_batches_tracked"
        counted = count in returned and count in sent
        one_step = counted and int(returned[count]) - int(sent[count]) == 1
        momentum = module.momentum
        if observation.protocol.norm_mode == "train" and one_step and momentum:
            after = returned[f"{name}.running_mean"], returned[f"{name}.running_var"]
            mean = (after[0] - (1 - momentum) * mean) / momentum
            variance = (after[1] - (1 - momentum) * variance) / momentum
        else:
            own = False
        found[name] = (mean, variance)
    return found, own and bool(found)
