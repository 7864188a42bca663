"""Against Soteria: match what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bract.attacks import Evidence, Known, declared
from bract.attacks.adaptive.chains import alone, named, noisy
from bract.attacks.adaptive.pruning import bound_dropped
from bract.attacks.adaptive.simulated_defense import Simulated, simulated
from bract.attacks.problem.evidence import CHAINS
from bract.attacks.problem.target_model import target_model_of
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.models.layers import last_linear
from bract_papers.defenses.soteria import Soteria


def mute_pruned_features(observation: Observation, known: Known) -> Evidence:
    """Trust everything but the pruned features' columns of the last layer's weight.

    Soteria touches that one matrix, and it shows where: a pruned feature's column is zero in every
    row. The other columns, the bias and all other layers are as the client computed them
    (Balunovic et al., ICLR 2022, section 5, mutes the whole layer). A column that is zero without
    having been pruned carries no gradient and is not missed.
    """
    del known
    hyper = declared(Soteria, observation)
    model = target_model_of(observation).model
    weight = f"{last_linear(model)[0]}.weight"
    zero = (observation.update[weight] == 0).all(dim=0)
    found, expected = int(zero.sum()), int(hyper.ratio * len(zero))
    if found < expected:
        raise BractError(
            f"{observation.key}: {found} columns of {weight} are zero, but the declared soteria "
            f"(ratio {hyper.ratio}) prunes {expected}; correct declaration.defenses",
            code="declaration-wrong",
        )
    wanted = observation.gradient()
    kept = (~zero).to(wanted[weight].dtype).expand_as(wanted[weight]).contiguous()
    return Evidence(
        target={name: wanted[name] for name in observation.parameters},
        weights={weight: kept},
        notes={
            "defense": "soteria",
            "method": "left the pruned features of the last layer out of the match",
            "pruned": zero.nonzero().flatten().tolist(),
        },
    )


@CHAINS.register("soteria then pruning")
def muted_and_pruned(observation: Observation, known: Known) -> Evidence:
    """Soteria, then pruning: bounds on dropped coordinates, none in columns that are zero."""
    muted = mute_pruned_features(alone(observation, 0), known)
    found = bound_dropped(alone(observation, 1), known)
    found = replace(
        found,
        weights=muted.weights,
        notes=found.notes | {"pruned": muted.notes["pruned"]},
    )
    return named(found, observation)


def without_last_layer(observation: Observation, known: Known) -> Simulated:
    """Leave the last layer's weight out: which of its columns were pruned does not show."""
    del known
    found = simulated(observation)
    weight = f"{last_linear(target_model_of(observation).model)[0]}.weight"
    return replace(
        found,
        weights={
            weight: found.target[weight].new_zeros(()).expand_as(found.target[weight]).contiguous()
        },
    )


CHAINS.register("soteria then noise")(partial(noisy, simulate=without_last_layer))
