"""Against FedKL keys from torch's CPU generator: try its seeds once gamma and beta are found.

An attack regresses gamma and beta of the locked layers. Where it explains the update, they are the
client's, and the seed under which torch draws just these is the seed of its key and lock layers:
the attacker then holds both, as the client drew them. The lock learns from round to round, so
the match is with a client's first round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bract.attacks.adaptive.weak_seeds import likely_seeds
from bract.attacks.result import SeedBudget
from bract.captures.observation import Observation
from bract.models.keylock import Lock
from bract.process import clock

EXPLAINED = 1e-3
"""Largest residual of a match whose gamma and beta are worth a search."""

_NEAR = 0.1
"""Root mean square by which gamma may be off without its bias, which the screen leaves out."""

_SAME = 0.02
"""Most that any gamma or beta may be off."""

_BY_CHANCE = 1e-3
"""Most wrong seeds that may be expected to fit, of all that are tried."""

_DENSITY = 1.2
"""Of gamma and beta as drawn, N(0, 1/9), at its mode."""

_COST = 16
"""Seeds of noise that are tried in the time of one key."""

_CHANNELS = 8


def lock_seed(
    observation: Observation,
    found: Mapping[str, Tensor],
    residual: float,
    budget: SeedBudget,
    *,
    layers: Sequence[tuple[str, int]],
    key_length: int,
    relu: bool,
) -> dict[str, Any]:
    """Search the seed under which torch draws a key and lock layers with these coefficients.

    Tried are the key drawn before the lock layers, with uniform numbers as `torch.nn.Linear` draws
    them. Under a ReLU what it holds at zero gives one bit of a seed only: nothing is tried where
    the values found would fit a wrong seed by chance.

    Parameters
    ----------
    found
        Regressed gamma and beta, ``(channels,)``, as ``<layer>.gamma`` and ``<layer>.beta``.
    residual
        What the match left of the update, relatively; above `EXPLAINED` nothing is tried.

    Returns
    -------
    dict
        ``weak_seed`` (None where none was found) and ``weak_seed_search`` with what was tried,
        JSON-ready.
    """
    begun = clock.now()
    tried, seed = 0, None
    layer, channels = layers[0]
    shown = min(channels, _CHANNELS)
    values = {name: v.double().clamp_min(0.0) if relu else v.double() for name, v in found.items()}
    gamma = values[f"{layer}.gamma"][:shown]
    count = budget.candidates // _COST
    if residual <= EXPLAINED and count * _chance(values, relu) <= _BY_CHANCE:
        for candidate in likely_seeds(observation, budget, "fedkl", count):
            tried += 1
            if _screened(candidate, gamma, key_length, relu) and _confirmed(
                candidate, values, layers, key_length, relu
            ):
                seed = candidate
                break
            if budget.seconds is not None and clock.now() - begun > budget.seconds:
                break
    return {
        "weak_seed": seed,
        "weak_seed_search": {"generator": "torch, CPU", "tried": tried, "of": "key and lock"},
    }


def _chance(values: Mapping[str, Tensor], relu: bool) -> float:
    """Return the most likely share of wrong seeds that fit all values, in (0, 1]."""
    dead = sum(int((v <= 0.0).sum()) for v in values.values()) if relu else 0
    total = sum(v.numel() for v in values.values())
    return float(0.5**dead * (2.0 * _SAME * _DENSITY) ** (total - dead))


def _screened(seed: int, gamma: Tensor, key_length: int, relu: bool) -> bool:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand((1 + len(gamma)) * key_length, generator=generator)
    key, rows = drawn[:key_length], drawn[key_length:].view(len(gamma), key_length)
    own = ((rows @ key - 0.5 * key.sum()) * (2.0 * key_length**-0.5)).double()
    if relu:
        own = own.clamp_min(0.0)
    return float((own - gamma).square().mean()) < _NEAR**2


def _confirmed(
    seed: int,
    values: Mapping[str, Tensor],
    layers: Sequence[tuple[str, int]],
    key_length: int,
    relu: bool,
) -> bool:
    generator = torch.Generator().manual_seed(seed)
    drawn = Lock.draw(dict(layers), key_length, relu=relu, source=generator).coefficients()
    return all(
        float((value.double() - values[name]).abs().max()) <= _SAME for name, value in drawn.items()
    )
