"""Against PRECODE: the bottleneck's noise, read off the update or searched with the images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.attacks import Evidence, Known, declared
from bract.attacks.adaptive.chains import as_simulated, noisy, pruned
from bract.attacks.adaptive.simulated_defense import Simulated
from bract.attacks.problem.client_model import (
    ForwardModel,
    LocalTraining,
    images_in,
    local_training,
    loss_gradient,
)
from bract.attacks.problem.evidence import CHAINS
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors
from bract_papers.defenses.precode import Precode

_ENCODER = ".bottleneck.encoder.weight"
_RANK_ONE = 1e-3
"""Largest part of a gradient that float32 may leave outside rank one; it leaves about 3e-8."""

_RESOLVED = 0.1
"""Largest error of the noise, in its own standard deviations, at which its size means anything."""

_DEVIATIONS = 6.0


@dataclass(frozen=True, kw_only=True)
class BottleneckClient:
    """A client whose bottleneck's noise is known, or an unknown that starts at zero: the mean.

    Attributes
    ----------
    block
        Name of the bottleneck in the model.
    shape
        Of the noise: ``(B, latent)``, or ``(steps, batch, latent)`` where steps are unrolled.
    training
        The local steps that are unrolled; None for a gradient.
    known
        Whether the noise is among the buffers; then nothing is unknown.
    """

    block: str
    shape: tuple[int, ...]
    training: LocalTraining | None = None
    known: bool = False

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Start every trial at the mean."""
        del target_model, generators
        return {} if self.known else {noise_name(self.block): torch.zeros(trials, *self.shape)}

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return what the client would send, the Kullback-Leibler term in its loss."""
        training, name = self.training, noise_name(self.block)
        state = buffers | unknowns
        if training is None:
            return loss_gradient(target_model, parameters, state, inputs, labels, auxiliary=True)
        batch, state = training.batches(inputs, labels, state)

        def gradient(step: int, current: Tensors) -> Tensors:
            images, rows = batch(step)
            drawn = {name: state[name][:, step, : images.shape[1]]}
            return loss_gradient(target_model, current, state | drawn, images, rows, auxiliary=True)

        end = training.trajectory(parameters, gradient)
        return training.mean_direction(parameters, end)


def undo_precode(observation: Observation, known: Known) -> Evidence:
    """Undo the bottleneck of an upload as PRECODE alone leaves it; see `bottlenecked`."""
    del known
    return bottlenecked(observation)


def bottlenecked(observation: Observation, *, exact: bool = True) -> Evidence:
    """Simulate the bottleneck with the client's own noise, and the client's whole loss.

    One image and one step: the noise follows in closed form (`read_noise`), to float32's
    resolution; what is left is an undefended model. Otherwise the noise is searched together
    with the images, from zero. It is small at first (sigma is 0.007), so the mean alone explains
    the update to a few per cent; the Kullback-Leibler term of the client's loss matters as much,
    and is simulated in either case.

    Parameters
    ----------
    exact
        Whether the update is the client's to rounding; otherwise the noise is always searched.
    """
    hyper = declared(Precode, observation)
    block = _block(observation, hyper)
    single = exact and _is_one_gradient(observation.declaration)
    notes: dict[str, Any] = {"defense": "precode"}
    found: Tensors = {}
    if single:
        noise, error = read_noise(observation, block)
        _check_noise(observation, noise, error)
        found[noise_name(block)] = noise
        notes |= {
            "method": "read the noise off the rank-one gradients of the bottleneck",
            "noise_error": error,
        }
    else:
        notes["method"] = "searched the noise together with the images, from zero"

    def adapt(forward: ForwardModel, images: int) -> BottleneckClient:
        training = local_training(forward)
        drawn: tuple[int, ...] = (images,)
        if training is not None:
            drawn = (training.steps, len(training.positions(0, images)))
        return BottleneckClient(
            block=block, shape=(*drawn, hyper.latent), training=training, known=single
        )

    wanted = observation.gradient()
    return Evidence(
        target={name: wanted[name] for name in observation.parameters},
        adapt=adapt,
        buffers=found,
        notes=notes,
    )


def read_noise(observation: Observation, block: str) -> tuple[Tensor, float]:
    """Recover one image's noise ``(1, latent)`` from one gradient, and the error to expect.

    The gradient of a linear layer for one input h is ``u h^T`` with u that of its bias. So the
    encoder's gives the features f, the decoder's the sample s, and the noise is ``(s - mu(f)) /
    sigma(f)``. The error is the root mean square, in units of the noise.
    """
    sent = {n: v.to(torch.float64) for n, v in observation.parameters.items()}
    features, _ = _input_of(observation, f"{block}.encoder")
    sample, spread = _input_of(observation, f"{block}.decoder")
    encoded = sent[f"{block}.encoder.weight"] @ features + sent[f"{block}.encoder.bias"]
    mean, width = encoded.chunk(2)
    deviation = F.softplus(width - 5.0)
    noise = (sample - mean) / deviation
    error = float((spread / deviation).square().mean().sqrt())
    return noise[None].to(torch.float32), error


def noise_name(block: str) -> str:
    """Name of a bottleneck's noise among the model's buffers."""
    return f"{block}.noise"


def _input_of(observation: Observation, layer: str) -> tuple[Tensor, Tensor]:
    """Return what entered a linear layer and the error of each coordinate, float64."""
    matrix = observation.update[f"{layer}.weight"].to(torch.float64)
    column = observation.update[f"{layer}.bias"].to(torch.float64)
    energy = float(column.square().sum())
    if energy == 0.0:
        raise BractError(
            f"{observation.key}: the gradient of {layer}.bias is zero; one image through the "
            "declared PRECODE does not make that; correct declaration.defenses",
            code="declaration-wrong",
        )
    row = column @ matrix / energy
    left = matrix - column[:, None] * row
    share = float(left.norm() / matrix.norm().clamp_min(1e-300))
    allowed = _RANK_ONE
    if observation.law.averaging:
        # The difference of two float32 weights is rounded to the resolution of the weights.
        weight = observation.parameters[f"{layer}.weight"].to(torch.float64)
        allowed += 2.0**-23 * float(weight.norm() / matrix.norm().clamp_min(1e-300))
    if share > allowed:
        raise BractError(
            f"{observation.key}: {share:.2g} of the gradient of {layer}.weight is outside rank "
            "one, one image leaves none there; correct batch_size, num_examples or "
            "declaration.defenses",
            code="declaration-wrong",
        )
    return row, left.norm(dim=0) / math.sqrt(energy)


def _check_noise(observation: Observation, noise: Tensor, error: float) -> None:
    size = float(noise.square().mean())
    # Wilson and Hilferty: the cube root of a mean of k squares is nearly N(1 - s^2, s^2).
    variance = 2.0 / (9.0 * noise.numel())
    reach = _DEVIATIONS * math.sqrt(variance)
    low, high = (max(0.0, 1.0 - variance + side) ** 3 for side in (-reach, reach))
    if error < _RESOLVED and not low <= size <= high + error:
        raise BractError(
            f"{observation.key}: the bottleneck's noise has mean square {size:.3g}; drawn from "
            f"N(0, 1), as PRECODE is declared to, it is between {low:.2g} and {high:.2g}; "
            "correct declaration.defenses",
            code="declaration-wrong",
        )


def _is_one_gradient(declaration: ClientDeclaration) -> bool:
    return (
        StepLaw.of(declaration).one_step
        and images_in(declaration, 2) == 1
        and (declaration.optimizer == "sgd")
    )


def _block(observation: Observation, hyper: Precode) -> str:
    found = [name for name in observation.parameters if name.endswith(_ENCODER)]
    if len(found) != 1:
        raise BractError(
            f"{observation.key}: PRECODE is declared, but {len(found)} of the captured parameters "
            f"are called *{_ENCODER}; correct declaration.defenses",
            code="declaration-wrong",
        )
    latent = observation.parameters[found[0]].shape[0] / 2
    if latent != hyper.latent:
        raise BractError(
            f"{observation.key}: the bottleneck holds {latent:g} values, declared are "
            f"{hyper.latent}; correct declaration.defenses",
            code="declaration-wrong",
        )
    return found[0].removesuffix(".encoder.weight")


def _searched(observation: Observation, known: Known) -> Simulated:
    del known
    return as_simulated(bottlenecked(observation, exact=False), observation)


CHAINS.register("precode then pruning")(partial(pruned, simulate=_searched))
CHAINS.register("precode then noise")(partial(noisy, simulate=_searched))
