"""Running statistics of a client's normalisation layers: as sent, as returned, of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import Observation

_SLACK = 1e-3
"""Share of a layer's largest running variance by which rounding, that of encryption's 16 bits
included, may bring the variance of a batch below zero."""

KINDS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


def observed_share(momentum: float, steps: int) -> float:
    """Return the share of a running statistic that ``steps`` steps made: ``1 - (1 - m)^K``."""
    return float(1.0 - (1.0 - momentum) ** steps)


@dataclass(frozen=True)
class RunningStatistics:
    """Buffers of a layer of batch normalisation; statistics are ``(channels,)``.

    Returned buffers are untrusted: ask `impossible_statistics` before the properties.

    Attributes
    ----------
    sent, returned
        By kind, one of `KINDS` or `COUNT`, as far as the capture holds them.
    momentum
        m of ``r <- (1 - m) r + m s``; 0 where the layer has none.
    """

    sent: Mapping[str, Tensor]
    returned: Mapping[str, Tensor]
    momentum: float

    @property
    def steps(self) -> int | None:
        """Local steps that the layer counted; None where a count is missing."""
        if COUNT not in self.sent or COUNT not in self.returned:
            return None
        return int(self.returned[COUNT]) - int(self.sent[COUNT])

    def of_batches(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and unbiased variance of the client's own batches; None where they are lost.

        Of one step those of its batch, to the rounding of float32; of K their mean, in which later
        steps weigh more: ``(r_K - (1 - m)^K r_0) / (1 - (1 - m)^K)``.
        """
        whole = all(kind in held for kind in KINDS for held in (self.sent, self.returned))
        steps = self.steps
        if not whole or not self.momentum or steps is None or steps < 1:
            return None
        share = observed_share(self.momentum, steps)
        mean, variance = (
            (self.returned[kind] - (1.0 - share) * self.sent[kind]) / share for kind in KINDS
        )
        return mean, variance


def running_statistics(
    observation: Observation, target_model: TargetModel
) -> dict[str, RunningStatistics]:
    """Return the buffers of each layer of batch normalisation, by its name."""

    def of(buffers: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
        names = {kind: f"{layer}.{kind}" for kind in (*KINDS, COUNT)}
        return {kind: buffers[name] for kind, name in names.items() if name in buffers}

    return {
        name: RunningStatistics(
            of(observation.buffers, name),
            of(observation.returned_buffers, name),
            float(module.momentum or 0.0),
        )
        for name, module in target_model.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }


def impossible_statistics(observation: Observation, target_model: TargetModel) -> str | None:
    """Return why returned batch statistics are impossible; None where they are possible.

    Returned buffers are untrusted: a client could use them to mislead the attack. Impossible are
    shapes other than what was sent, values that are not finite or whose square overflows, a
    negative variance, running or of the client's batches, and counts of batches below what was
    sent. One such layer makes the word of all worthless. Where normalisation was not by the batch
    nothing is read.
    """
    if observation.declaration.norm_mode != "train":
        return None
    for name, layer in running_statistics(observation, target_model).items():
        why = _impossible(layer)
        if why is not None:
            return f"{name}.{why}"
    return None


def _impossible(layer: RunningStatistics) -> str | None:
    sent, returned = layer.sent, layer.returned
    for kind in (*KINDS, COUNT):
        if kind not in sent or kind not in returned:
            continue
        before, after = sent[kind], returned[kind]
        if after.shape != before.shape:
            return f"{kind} was returned as {tuple(after.shape)}, sent as {tuple(before.shape)}"
        if not _usable(after):
            return f"{kind} holds NaN, infinite or overflowing values"
    if "running_var" in sent and "running_var" in returned:
        low = float(returned["running_var"].min())
        if low < 0.0:
            return f"running_var is {low:.3g}; a variance is at least 0"
    if layer.steps is not None and layer.steps < 0:
        return f"{COUNT} fell from {int(sent[COUNT])} to {int(returned[COUNT])}"
    own = layer.of_batches()
    if own is None or layer.steps is None:
        return None
    share = observed_share(layer.momentum, layer.steps)
    for kind, value in zip(KINDS, own, strict=True):
        if not _usable(value):
            return f"{kind} gives overflowing values of the client's batches"
        largest = torch.maximum(sent[kind].abs(), returned[kind].abs()).max()
        slack = _SLACK * float(largest) / share
        if kind == "running_var" and float(value.min()) < -slack:
            return (
                f"running_var gives a variance of {float(value.min()):.3g} of the client's "
                "batches; a variance is at least 0"
            )
    return None


def _usable(value: Tensor) -> bool:
    """Return whether every value is finite, and its square in float32."""
    return bool(value.isfinite().all()) and bool(value.float().square().isfinite().all())
