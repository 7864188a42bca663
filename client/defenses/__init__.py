"""Client-side defenses, one file each."""

from bract.client.defenses.adadefense import AdaDefense
from bract.client.defenses.base import (
    DEFENSES,
    Defense,
    DefenseError,
    ProtectContext,
    Stage,
)
from bract.client.defenses.chain import DefenseChain, build_defense, build_defenses
from bract.client.defenses.fedkl import FedKL
from bract.client.defenses.guardian import Guardian
from bract.client.defenses.noise import Noise
from bract.client.defenses.precode import Precode
from bract.client.defenses.pruning import Pruning
from bract.client.defenses.soteria import Soteria
from bract.client.defenses.state import DefenseState

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
