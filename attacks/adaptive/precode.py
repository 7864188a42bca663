"""Against PRECODE: the bottleneck's noise, read off the update or searched with the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from bract.attacks.adaptive.declared import Declared, declared
from bract.attacks.evidence import ADAPTIVE, Evidence
from bract.attacks.simulation import (
    ForwardModel,
    LocalTraining,
    images_in,
    local_training,
    loss_gradient,
)
from bract.attacks.victim import Victim
from bract.errors import BractError
from bract.observation import Observation
from bract.update import Tensors


class PrecodeHyper(Declared):
    """Declared hyper-parameters of PRECODE; see the defense for their meaning."""

    latent: Annotated[int, Field(ge=1)] = 256
    weight: Annotated[float, Field(ge=0.0)] = 1e-3


@dataclass(frozen=True, kw_only=True)
class BottleneckClient:
    """A client whose bottleneck's noise is an unknown, or known already.

    Attributes
    ----------
    block
        Name of the bottleneck in the model.
    shape
        Of the noise: ``(B, latent)``, or ``(steps, batch, latent)`` where steps are unrolled.
    training
        The local steps that are unrolled; None for a gradient.
    known
        Whether the noise stands among the buffers; then nothing is unknown.
    """

    block: str
    shape: tuple[int, ...]
    training: LocalTraining | None = None
    known: bool = False
    start: str = "mean"

    def unknowns(self, victim: Victim, lanes: int, generators: list[torch.Generator]) -> Tensors:
        """Start from the mean: no noise."""
        del victim
        if self.known or self.start == "fixed":
            return {}
        if self.start == "draw":
            return {self._name: torch.stack([torch.randn(self.shape, generator=g) for g in generators])}
        return {self._name: torch.zeros(lanes, *self.shape)}

    def __call__(
        self,
        victim: Victim,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return what the client would send, its loss with the Kullback-Leibler term."""
        training = self.training
        state = buffers | unknowns
        if training is None:
            return loss_gradient(victim, parameters, state, inputs, labels, auxiliary=True)
        count = inputs.shape[1]

        def gradient(step: int, current: Tensors) -> Tensors:
            taken = training.positions(step, count)
            drawn = {self._name: state[self._name][:, step]} if self._name in state else {}
            return loss_gradient(
                victim,
                current,
                state | drawn,
                inputs[:, taken],
                labels[:, taken],
                auxiliary=True,
            )

        end = training.trajectory(parameters, gradient)
        return training.mean_direction(parameters, end)

    @property
    def _name(self) -> str:
        return f"{self.block}.noise"


@ADAPTIVE.register("precode")
def undo_precode(observation: Observation, history: Sequence[Observation]) -> Evidence:
    """Simulate the bottleneck with the client's own noise.

    One image and one step: the gradients of encoder and decoder are rank one, and their factors
    hand over the features f, the sample s and so the noise ``(s - mu(f)) / sigma(f)`` in closed
    form, exactly. PRECODE then hides nothing.
    """
    del history
    hyper = declared(PrecodeHyper, observation)
    block = _block(observation, hyper)
    single = images_in(observation.protocol, 2) == 1 and (observation.protocol.algorithm == "fedsgd" or observation.protocol.local_steps == 1)
    wanted = observation.gradient()
    noise: Tensors = {}
    notes: dict[str, Any] = {"defense": "precode"}
    if single:
        noise[f"{block}.noise"] = read_noise(observation, block)
        notes["method"] = "noise read off the rank-one gradients of the bottleneck"
    else:
        notes["method"] = "noise searched together with the images"

    def adapt(forward: ForwardModel, images: int) -> BottleneckClient:
        training = local_training(forward)
        drawn = (images,) if training is None else (training.steps, min(training.batch_size, images))
        return BottleneckClient(
            block=block, shape=(*drawn, hyper.latent), training=training, known=single
        )

    return Evidence(
        target={name: wanted[name] for name in observation.parameters},
        adapt=adapt,
        buffers=noise,
        notes=notes,
    )


def _block(observation: Observation, hyper: PrecodeHyper) -> str:
    suffix = ".encoder.weight"
    found = [n.removesuffix(suffix) for n in observation.parameters if n.endswith(f"bottleneck{suffix}")]
    if len(found) != 1:
        raise BractError(
            f"{observation.key}: PRECODE is declared, but the captured model has {len(found)} bottlenecks; "
            "correct protocol.defenses"
        )
    rows = observation.parameters[f"{found[0]}{suffix}"].shape[0]
    if rows != 2 * hyper.latent:
        raise BractError(f"{observation.key}: bottleneck of {rows // 2} values, declared {hyper.latent}; correct protocol.defenses")
    return found[0]


def read_noise(observation: Observation, block: str) -> Tensor:
    """Return the noise ``(1, latent)``."""
    update = {n: v.to(torch.float64) for n, v in observation.update.items()}
    sent = {n: v.to(torch.float64) for n, v in observation.parameters.items()}

    def factor(layer: str) -> Tensor:
        matrix, column = update[f"{block}.{layer}.weight"], update[f"{block}.{layer}.bias"]
        row = column @ matrix / column.square().sum()
        print(layer, float((matrix - column[:, None] * row).norm() / matrix.norm()))
        return row

    features, sample = factor("encoder"), factor("decoder")
    mean, width = (
        sent[f"{block}.encoder.weight"] @ features + sent[f"{block}.encoder.bias"]
    ).chunk(2)
    deviation = F.softplus(width - 5.0)
    return ((sample - mean) / deviation)[None].float()
