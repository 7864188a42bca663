"""What a client does with its defenses: the order of a chain, and the state they keep."""

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
    Precode,
    ProtectContext,
    Pruning,
    Soteria,
    Stage,
)

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
    "Precode",
    "ProtectContext",
    "Pruning",
    "Soteria",
    "Stage",
    "build_defense",
    "build_defenses",
]
