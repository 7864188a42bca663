"""Against Soteria: match what it leaves alone."""

from __future__ import annotations

from bract.attacks.adaptive.declared import declared
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known
from bract.attacks.problem.target_model import target_model_of
from bract.captures.observation import Observation
from bract.defenses.soteria import Soteria
from bract.errors import BractError
from bract.models.layers import last_linear


@ADAPTIVE.register("soteria")
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
