"""Against pruning: match what survived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from bract.attacks.adaptive.declared import Declared, declared
from bract.attacks.evidence import ADAPTIVE, Evidence
from bract.errors import BractError
from bract.observation import Observation
from bract.update import flatten


class PruningHyper(Declared):
    """Declared hyper-parameters of pruning."""

    ratio: float = 0.9
    scope: Literal["whole", "tensor"] = "whole"


@ADAPTIVE.register("pruning")
def match_survivors(observation: Observation, history: Sequence[Observation]) -> Evidence:
    """Trust the coordinates that are not exactly zero, and no others.

    A survivor is exact; of a dropped coordinate only its bound is known.

    Raises
    ------
    BractError
        If fewer coordinates are zero than the declared ratio drops.
    """
    del history
    hyper = declared(PruningHyper, observation)
    whole = flatten(observation.update)
    groups = {"the update": whole} if hyper.scope == "whole" else dict(observation.update)
    for name, values in groups.items():
        dropped, expected = int((values == 0).sum()), int(hyper.ratio * values.numel())
        if dropped < expected:
            raise BractError(
                f"{observation.key}: {dropped} coordinates of {name} are zero, but the declared "
                f"pruning (ratio {hyper.ratio}) drops {expected}; correct protocol.defenses"
            )
    wanted = observation.gradient()
    weights = {n: (wanted[n] != 0).to(wanted[n].dtype) for n in observation.parameters}
    return Evidence(
        target={n: wanted[n] for n in observation.parameters},
        weights=weights,
        notes={
            "defense": "pruning",
            "method": "matched surviving coordinates only",
            "surviving": float((whole != 0).to(torch.float64).mean()),
        },
    )
