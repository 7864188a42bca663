"""Returned batch statistics as further equations to match."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bract.attacks.problem.target_model import TargetModel
from bract.attacks.solve.regularizers import known_statistics
from bract.captures.observation import Observation
from bract.updates.update import Tensors, flatten

SHARE = 0.1
"""Size of the statistics relative to the gradient, both as vectors."""

_MEAN, _VARIANCE = ".running_mean", ".running_var"


def statistics_to_match(
    observation: Observation, target_model: TargetModel
) -> tuple[Tensors, Tensors]:
    """Return the statistics of the client's own batch and their weights, both ``(channels,)``.

    Normalisation by the batch's own statistics hides brightness and contrast from the gradient:
    only the statistics themselves determine. They follow from the running ones after a single step;
    elsewhere nothing is returned.

    Means count in units of the channel's standard deviation, variances relatively, all together
    `SHARE` of the gradient's norm.
    """
    known, own = known_statistics(observation, target_model)
    if not own:
        return {}, {}
    wanted = observation.gradient()
    gradient = flatten({name: wanted[name] for name in observation.parameters})
    count = sum(2 * len(mean) for mean, _ in known.values())
    energy = SHARE**2 * float(gradient.square().sum()) / count
    target: Tensors = {}
    weights: Tensors = {}
    for layer, (mean, variance) in known.items():
        mean_name, variance_name = statistic_names(layer)
        positive = variance.clamp_min(1e-12)
        target |= {mean_name: mean, variance_name: variance}
        weights |= {mean_name: energy / positive, variance_name: energy / positive.square()}
    return target, weights


def simulated_statistics(
    target_model: TargetModel,
    parameters: Tensors,
    buffers: Tensors,
    inputs: Tensor,
    layers: Sequence[str],
) -> Tensors:
    """Return what `statistics_to_match` names, for candidate inputs ``(L, B, C, H, W)``."""
    if not layers:
        return {}
    seen = target_model.batch_statistics(parameters, buffers, inputs)
    found: Tensors = {}
    for layer in layers:
        found |= dict(zip(statistic_names(layer), seen[layer], strict=True))
    return found


def layers_of(statistics: Tensors) -> tuple[str, ...]:
    """Return the layers whose statistics these are."""
    return tuple(n.removesuffix(_MEAN) for n in statistics if n.endswith(_MEAN))


def statistic_names(layer: str) -> tuple[str, str]:
    """Names of a layer's mean and variance, as its buffers are called."""
    return f"{layer}{_MEAN}", f"{layer}{_VARIANCE}"
