"""A client's defenses: the order of a chain, and their state."""

from bract.client.defenses.chain import DefenseChain, build_defense, build_defenses
from bract.client.defenses.state import DefenseState
from bract.defenses import DEFENSES, AdaDefense, Defense, FedKL, Guardian, ProtectContext, Stage
from bract.defenses.base import DefenseError
from bract.defenses.noise import Noise
from bract.defenses.precode import Precode
from bract.defenses.pruning import Pruning
from bract.defenses.soteria import Soteria

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
