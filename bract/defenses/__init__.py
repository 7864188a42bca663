"""Defenses, one file each: the public specification, and a client's computation to protect.

A client protects with a defense, its adaptive attacker and the report read the same fields. Every
module here is imported, so a defense in one file registers without a line elsewhere.
"""

import sys

from bract.defenses.adadefense import AdaDefense
from bract.defenses.base import (
    DEFENSES,
    Defense,
    DefenseError,
    DefenseSpec,
    Keeps,
    ProtectContext,
    Stage,
    cosine_and_ratio,
)
from bract.defenses.entries import prepare_model, read_defense, read_settings
from bract.defenses.fedkl import FedKL
from bract.defenses.guardian import Guardian
from bract.defenses.noise import Noise
from bract.defenses.own_model import defended, keylock
from bract.defenses.precode import Precode
from bract.defenses.pruning import Pruning
from bract.defenses.soteria import Soteria
from bract.registry import import_modules

__all__ = [
    "DEFENSES",
    "AdaDefense",
    "Defense",
    "DefenseError",
    "DefenseSpec",
    "FedKL",
    "Guardian",
    "Keeps",
    "Noise",
    "Precode",
    "ProtectContext",
    "Pruning",
    "Soteria",
    "Stage",
    "cosine_and_ratio",
    "defended",
    "keylock",
    "prepare_model",
    "read_defense",
    "read_settings",
]

import_modules(sys.modules[__name__])
