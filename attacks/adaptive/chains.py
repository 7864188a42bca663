"""Against two defenses in a row: parts that are functions of the gradient come before the noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bract.attacks.adaptive.noise import noise_after
from bract.attacks.adaptive.pruning import bound_dropped
from bract.attacks.adaptive.simulated_defense import Prune
from bract.attacks.adaptive.soteria import mute_pruned_features
from bract.attacks.problem.evidence import CHAINS, Evidence, Known
from bract.defenses.entries import read_settings
from bract.defenses.pruning import Pruning
from bract.protocol.observation import Observation


def pruned_and_noisy(observation: Observation, known: Known) -> Evidence:
    """Pruning, then noise: Gaussian or Laplace around the clipped, pruned update.

    ``-log p(u | x) = |u - c(P(g)) P(g)|^2 / (2 sigma^2)`` with P the pruning of the candidate's own
    gradient. Which coordinates were dropped does not show under noise; each candidate determines
    it.
    """
    first, last = observation.declaration.defenses
    hyper = read_settings(Pruning, first)
    found = noise_after(_declaring(observation, last), known, Prune(hyper.ratio, hyper.scope))
    if found.likelihood is None:
        # The noise is gone: what is left is a pruned update.
        kept = {n: (v != 0).to(v.dtype) for n, v in found.target.items()}
        found = replace(found, weights=kept)
    return replace(found, notes=found.notes | {"defense": "pruning, noise"})


def muted_and_pruned(observation: Observation, known: Known) -> Evidence:
    """Soteria, then pruning: bounds on dropped coordinates, none in columns that are zero."""
    first, last = observation.declaration.defenses
    muted = mute_pruned_features(_declaring(observation, first), known)
    found = bound_dropped(_declaring(observation, last), known)
    return replace(
        found,
        weights=muted.weights,
        notes=found.notes | {"defense": "soteria, pruning", "pruned": muted.notes["pruned"]},
    )


def _declaring(observation: Observation, *defenses: Any) -> Observation:
    declaration = replace(observation.declaration, defenses=defenses)
    return replace(observation, declaration=declaration)


CHAINS |= {("pruning", "noise"): pruned_and_noisy, ("soteria", "pruning"): muted_and_pruned}
