"""A client's defenses: the order of a chain, and their state."""

from bract.client.defenses.chain import DefenseChain, build_defense, build_defenses
from bract.client.defenses.state import DefenseState
from bract.defenses import (
    DEFENSES,
    AdaDefense,
    Defense,
    DefenseError,
    FedKL,
    Guardian,
    Noise,
    ProtectContext,
    Stage,
)
from bract.defenses.pruning import Pruning

__all__ = [
    "DEFENSES",
    "AdaDefense",
    "Defense",
    "DefenseChain",
    "DefenseError",
    "DefenseState",
    "FedKL",
    "Guardian",
    "Noise",
    "ProtectContext",
    "Pruning",
    "Stage",
    "build_defense",
    "build_defenses",
]
