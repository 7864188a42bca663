"""Whether the statistics that a client returned can be those of any training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bract.attacks.problem.target_model import TargetModel
from bract.protocol.observation import Observation

_SLACK = 1e-3
"""Share of a layer's largest running variance by which rounding, that of encryption's 16 bits
included, may bring the variance of a batch below zero."""

KINDS = ("running_mean", "running_var")


def observed_share(momentum: float, steps: int) -> float:
    """Return the share of a running statistic that ``steps`` steps made: ``1 - (1 - m)^K``."""
    return float(1.0 - (1.0 - momentum) ** steps)


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
    for name, module in target_model.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            why = _impossible(observation, name, float(module.momentum or 0.0))
            if why is not None:
                return f"{name}.{why}"
    return None


def _impossible(observation: Observation, layer: str, momentum: float) -> str | None:
    sent, returned = observation.buffers, observation.returned_buffers
    names = {kind: f"{layer}.{kind}" for kind in (*KINDS, "num_batches_tracked")}
    both = {kind: n for kind, n in names.items() if n in sent and n in returned}
    for kind, name in both.items():
        before, after = sent[name], returned[name]
        if after.shape != before.shape:
            return f"{kind} was returned as {tuple(after.shape)}, sent as {tuple(before.shape)}"
        if not _usable(after):
            return f"{kind} holds NaN, infinite or overflowing values"
    if "running_var" in both and float(returned[names["running_var"]].min()) < 0.0:
        low = float(returned[names["running_var"]].min())
        return f"running_var is {low:.3g}; a variance is at least 0"
    if len(both) < len(names):
        return None
    count = names["num_batches_tracked"]
    steps = int(returned[count]) - int(sent[count])
    if steps < 0:
        return f"num_batches_tracked fell from {int(sent[count])} to {int(returned[count])}"
    if not steps or not momentum:
        return None
    share = observed_share(momentum, steps)
    for kind in KINDS:
        before, after = sent[names[kind]], returned[names[kind]]
        own = (after - (1.0 - share) * before) / share
        if not _usable(own):
            return f"{kind} gives overflowing values of the client's batches"
        slack = _SLACK * float(torch.maximum(before.abs(), after.abs()).max()) / share
        if kind == "running_var" and float(own.min()) < -slack:
            return (
                f"running_var gives a variance of {float(own.min()):.3g} of the client's batches; "
                "a variance is at least 0"
            )
    return None


def _usable(value: Tensor) -> bool:
    """Return whether every value is finite, and its square in float32."""
    return bool(value.isfinite().all()) and bool(value.float().square().isfinite().all())
