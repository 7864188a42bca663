"""Against pruning: match what survived."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.simulated_defense import Prune, defended_by
from bract.attacks.problem.evidence import ADAPTIVE, FORWARD, Evidence, Known
from bract.captures.observation import Observation
from bract.defenses.pruning import Pruning
from bract.errors import BractError
from bract.updates.update import Tensors, flatten


@ADAPTIVE.register("pruning")
def bound_dropped(observation: Observation, known: Known) -> Evidence:
    """Trust survivors, and hold every dropped coordinate below the smallest of them.

    Pruning is a function of the gradient g, so its likelihood is a step:
    ``p(u | x) = 1`` where ``g_i(x) = u_i`` for every survivor and ``|g_i(x)| <= t`` for every
    dropped coordinate, 0 elsewhere, with t the smallest survivor's magnitude (in its own tensor
    for ``scope: tensor``). Being no density, it gives a prior no weight: an attack keeps its own
    distance and prior, and measures the distance to the set where p is 1 (`Evidence.bounds`).
    """
    del known
    hyper = checked_pruning(observation)
    wanted = {n: observation.gradient()[n] for n in observation.parameters}
    limits = _limits(hyper, wanted)
    return Evidence(
        target=wanted,
        bounds=bounds_on_dropped(hyper, wanted),
        notes={
            "defense": "pruning",
            "method": "matched surviving coordinates, held the others below the smallest of them",
            "surviving": surviving_share(observation),
            "threshold": None if hyper.scope == "tensor" else min(limits.values()),
        },
    )


def bounds_on_dropped(hyper: Pruning, sent: Tensors) -> Tensors:
    """Return how far from zero each dropped coordinate may have been; survivors are exact."""
    limits = _limits(hyper, sent)
    return {
        n: torch.where(v == 0, min(limits[n], torch.finfo(v.dtype).max), 0.0).to(v.dtype)
        for n, v in sent.items()
    }


def _limits(hyper: Pruning, sent: Tensors) -> dict[str, float]:
    limits = {n: _smallest(v) for n, v in sent.items()}
    return limits if hyper.scope == "tensor" else dict.fromkeys(limits, min(limits.values()))


@FORWARD.register("pruning")
def simulate_pruning(observation: Observation, known: Known) -> Evidence:
    """Prune the candidates' gradients by the declared ratio, and compare all coordinates."""
    del known
    hyper = checked_pruning(observation)
    wanted = observation.gradient()
    return Evidence(
        target={n: wanted[n] for n in observation.parameters},
        adapt=defended_by(Prune(hyper.ratio, hyper.scope)),
        notes={
            "defense": "pruning",
            "method": "pruned candidates alike",
            "surviving": surviving_share(observation),
        },
    )


def checked_pruning(observation: Observation) -> Pruning:
    """Return the declared pruning of an update that has the zeros for it."""
    hyper = declared(Pruning, observation)
    whole = flatten(observation.update)
    groups = {"the update": whole} if hyper.scope == "whole" else dict(observation.update)
    for name, values in groups.items():
        dropped, expected = int((values == 0).sum()), int(hyper.ratio * values.numel())
        if dropped < expected:
            raise BractError(
                f"{observation.key}: {dropped} coordinates of {name} are zero, but the declared "
                f"pruning (ratio {hyper.ratio}) drops {expected}; correct declaration.defenses",
                code="declaration-wrong",
            )
    return hyper


def _smallest(values: Tensor) -> float:
    """Return the smallest magnitude that is not zero; infinity without any."""
    magnitudes = values.abs().to(torch.float64)
    return float(magnitudes[magnitudes > 0].min()) if bool(values.any()) else math.inf


def surviving_share(observation: Observation) -> float:
    """Share of coordinates that were not dropped."""
    return float((flatten(observation.update) != 0).to(torch.float64).mean())
