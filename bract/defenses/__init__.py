"""Defenses, one file each: the public specification, and a client's computation to protect.

A client protects with a defense, its adaptive attacker and the report read the same fields. Every
module here is imported, so a defense in one file registers without a line elsewhere.
"""

import sys

from bract.defenses.adadefense import AdaDefense
from bract.defenses.base import DEFENSES, Defense, DefenseError, ProtectContext, Stage
from bract.defenses.configured import configured_model
from bract.defenses.entries import noise_entry, read_settings
from bract.defenses.fedkl import FedKL
from bract.defenses.guardian import Guardian
from bract.defenses.noise import Noise
from bract.defenses.own_model import keylock
from bract.defenses.per_example import PerExample
from bract.defenses.words import title
from bract.registry import import_modules

__all__ = [
    "DEFENSES",
    "AdaDefense",
    "Defense",
    "DefenseError",
    "FedKL",
    "Guardian",
    "Noise",
    "PerExample",
    "ProtectContext",
    "Stage",
    "configured_model",
    "keylock",
    "noise_entry",
    "read_settings",
    "title",
]

import_modules(sys.modules[__name__])
