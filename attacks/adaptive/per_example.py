"""Against per-example privacy: the likelihood of the upload, by the known noise of its steps."""

from __future__ import annotations

import math

from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.simulated_defense import Clip, defended_by
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known
from bract.attacks.problem.likelihoods import GaussianLikelihood
from bract.captures.observation import Observation
from bract.defenses.per_example import PerExample
from bract.errors import BractError
from bract.updates.update import flatten


@ADAPTIVE.register("per-example")
def weigh_per_example_noise(observation: Observation, known: Known) -> Evidence:
    """State the likelihood of an upload of noisy steps, and clip what is simulated.

    A step moves the weights by ``lr / B (sum_i min(1, C / |g_i|) g_i + sigma C N)`` over a Poisson
    sample, with ``B`` the declared batch size. Of K steps of plain SGD the noises add up: as a
    gradient their sum has the deviation ``sigma C / (B sqrt(K))`` (`StepLaw.noise_gain`); momentum
    m weighs the noise of step t with ``(1 - m^(K - t + 1)) / (1 - m)``.

    The simulated client's gradient is clipped to C as a whole. Of one example that is exact; of
    more it bounds their mean only, and which examples were drawn is not known: the search takes
    all of them for drawn once.

    Raises
    ------
    BractError
        If no noise multiplier, batch size or learning rate is declared, the optimizer's steps are
        not linear in their noise, or the upload holds less energy than the noise alone.
    """
    del known
    hyper, p = declared(PerExample, observation), observation.declaration
    if hyper.noise_multiplier is None or not p.batch_size:
        raise BractError(
            f"{observation.key}: the noise of a step is not known; declare noise_multiplier of "
            "per-example, and batch_size",
            code="declaration-lacks",
        )
    if observation.law.averaging and p.optimizer != "sgd":
        raise BractError(
            f"{observation.key}: noise of steps of {p.optimizer} has no known law in their sum; "
            "attack it as oblivious",
            code="attack-unsuited",
        )
    step = hyper.noise_multiplier * hyper.max_grad_norm / p.batch_size
    deviation = step * observation.law.noise_gain
    vector = flatten(observation.update).double() * observation.law.to_gradient
    doubt = 6.0 * math.sqrt(2.0 / vector.numel())
    found = math.sqrt(float(vector.square().mean()))
    if found < deviation * math.sqrt(max(0.0, 1.0 - doubt)):
        raise BractError(
            f"{observation.key}: the root mean square is {found:.3g}, below what the declared "
            f"noise alone makes, {deviation:.3g}; correct declaration.defenses",
            code="declaration-wrong",
        )
    wanted = observation.gradient()
    return Evidence(
        target={name: wanted[name] for name in observation.parameters},
        adapt=defended_by(Clip(hyper.max_grad_norm)),
        likelihood=GaussianLikelihood(deviation),
        notes={
            "defense": "per-example",
            "method": "maximised the likelihood of the upload times a prior on images",
            "deviation": deviation,
            "steps": observation.law.counted,
            "approximation": "clipped as a whole" if p.batch_size > 1 else "none",
        },
    )
