"""Against clipping and noise: the likelihood of the upload, by the known law of the noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from bract.attacks.adaptive.clipping_factor import shrinkage
from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.simulated_defense import Clip, Part, Simulated, simulated
from bract.attacks.adaptive.weak_seeds import SeedFinding, find_noise_seed
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.target_model import target_model_of
from bract.captures.observation import Observation
from bract.defenses.noise import Noise
from bract.errors import BractError
from bract.updates.update import flatten


@ADAPTIVE.register("noise")
def weigh_noise(observation: Observation, known: Known) -> Evidence:
    """State the likelihood of the upload: it is the clipped update plus noise of a known law.

    With g(x) the simulated update, C the bound and c(g) = min(1, C / \\|g\\|) the factor of
    clipping (1 without ``clip``; the 1-norm for Laplace noise with ``epsilon``), an upload u has

    - Gaussian: ``-log p(u | x) = |u - c(g(x)) g(x)|^2 / (2 sigma^2) + D log(sigma sqrt(2 pi))``
    - Laplace: ``-log p(u | x) = |u - c(g(x)) g(x)|_1 / b + D log(2 b)``, ``b = sigma / sqrt(2)``

    so the factor is no unknown: it follows from the candidate. Everything is scaled to gradients
    (`StepLaw.to_gradient`). The prior's weight follows from sigma, since
    both are in nats (`bract.attacks.solve.regularizers.NaturalImages`). Cutting to the noise's
    grid, at most 2^-30 of sigma, is left out.

    Before that, seeds of torch's CPU generator are tried
    (`bract.attacks.adaptive.weak_seeds`); where one fits, the noise is subtracted exactly,
    ``notes["weak_seed"]`` is that seed, and there is no noise left to weigh.

    Rounds are not averaged: the parameters move from one round to the next and so does the
    gradient, even of the same image; and clients draw other images. An attack on several rounds
    matches each at its own parameters (`bract.attacks.problem.joint_case`).

    Raises
    ------
    BractError
        If the declaration does not determine the noise, or the update holds less energy than the
        declared noise alone would, or more than it and the clipping norm together (by six standard
        deviations).
    """
    return noise_after(observation, known)


def noise_after(
    observation: Observation,
    known: Known,
    simulate: Callable[[Observation], Simulated] = simulated,
) -> Evidence:
    """Return what `weigh_noise` does, with another defense before the clipping.

    Parameters
    ----------
    simulate
        Reads an upload of the defense before the clipping, as if no noise were on it.
    """
    hyper, _, _ = checked_noise(observation)
    search = find_noise_seed(observation, hyper, known.weak_seeds)
    if search.update is not None:
        if simulate is simulated:
            return without_noise(observation, hyper, search)
        first = simulate(replace(observation, update=search.update))
        return Evidence(
            target=first.target,
            weights=first.weights,
            adapt=first.followed_by(*clipping(hyper, first.unit)),
            buffers=first.buffers,
            notes={
                **first.notes,
                "method": "subtracted the noise, whose seed was found",
                "deviation": 0.0,
                **search.notes(),
            },
        )
    first = simulate(observation)
    deviation = hyper.deviation * first.unit
    kind = GaussianLikelihood if hyper.kind == "gaussian" else LaplaceLikelihood
    return Evidence(
        target=first.target,
        weights=first.weights,
        adapt=first.followed_by(*clipping(hyper, first.unit)),
        buffers=first.buffers,
        likelihood=kind(deviation),
        notes={
            **first.notes,
            "defense": "noise",
            "method": "maximised the likelihood of the upload times a prior on images",
            "deviation": deviation,
            **search.notes(),
        },
    )


def clipping(hyper: Noise, unit: float) -> tuple[Part, ...]:
    """Return the clipping of a declared noise; nothing where it does not clip.

    Parameters
    ----------
    unit
        Factor from an update to what is simulated.
    """
    if hyper.clip is None:
        return ()
    order: Literal[1, 2] = 1 if hyper.kind == "laplace" and hyper.epsilon is not None else 2
    return (Clip(hyper.clip * unit, order),)


def checked_noise(observation: Observation) -> tuple[Noise, float, int]:
    """Return the declared noise, and the update's squared norm and number of coordinates."""
    hyper = declared(Noise, observation)
    deviation = hyper.deviation
    vector = flatten(observation.update).to(torch.float64)
    energy, count = float(vector.square().sum()), vector.numel()
    fourth = 3.0 if hyper.kind == "gaussian" else 6.0
    doubt = 6.0 * math.sqrt((fourth - 1.0) / count)
    if energy < (1.0 - doubt) * count * deviation**2:
        raise BractError(
            f"{observation.key}: the root mean square is {math.sqrt(energy / count):.3g}, below "
            f"what the declared noise alone makes, {deviation:.3g}; correct declaration.defenses",
            code="declaration-wrong",
        )
    if hyper.clip is not None:
        # The 1-norm bounds the 2-norm.
        spread = deviation**2 * math.sqrt((fourth - 1.0) * count) + 2.0 * deviation * hyper.clip
        most = hyper.clip**2 * (1.0 + 1e-5) + count * deviation**2 + 6.0 * spread
        if energy > most:
            raise BractError(
                f"{observation.key}: the norm is {math.sqrt(energy):.4g}, but the declared "
                f"clipping to {hyper.clip} and noise of {deviation:.3g} allow "
                f"{math.sqrt(most):.4g}; correct declaration.defenses",
                code="declaration-wrong",
            )
    return hyper, energy, count


def without_noise(observation: Observation, hyper: Noise, search: SeedFinding) -> Evidence:
    """Return the clipped update itself: its noise came from a seed that was found."""
    assert search.update is not None
    rest = replace(observation, update=search.update)
    wanted = rest.gradient()
    target = {name: wanted[name] for name in observation.parameters}
    norm = float(flatten(rest.update).to(torch.float64).norm())
    notes: dict[str, Any] = {
        "defense": "noise",
        "method": "subtracted the noise, whose seed was found",
        "deviation": 0.0,
        "norm": norm,
        **search.notes(),
    }
    order = 1 if hyper.kind == "laplace" and hyper.epsilon is not None else 2
    if hyper.clip is None or (order == 2 and norm < hyper.clip * (1.0 - 1e-4)):
        return Evidence(target=target, notes=notes | {"clipped": "no: the norm is below the bound"})
    factor = shrinkage(rest, target_model_of(observation), target)
    notes |= {"clipped": "possibly: by a factor in (0, 1]", "factor": factor}
    if factor is not None:
        target = {name: value * factor for name, value in target.items()}
    return Evidence(target=target, unknown_factor=factor is None, notes=notes)
