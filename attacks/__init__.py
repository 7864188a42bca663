"""Gradient inversion attacks on captured observations.

Every module of `bract.attacks.methods` and `bract.attacks.adaptive` is imported here, so an attack
in one file there registers without a line elsewhere.
"""

from bract.attacks import adaptive, methods
from bract.attacks.adaptive.declared import declared
from bract.attacks.base import Attack
from bract.attacks.methods.grnn.grnn import GRNN
from bract.attacks.methods.ig import IG
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.problem.case import Case
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known, has_attacker
from bract.attacks.problem.objectives import Cosine, Objective
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.public_prior import PublicPrior, load_prior
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.reading import Inverse, Reading, ReadingBudget
from bract.attacks.registry import ATTACKS, attack, reconstruct, reconstruct_over_rounds
from bract.attacks.result import Budget, Determined, Reconstruction, Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.engine import Engine, Progress
from bract.attacks.solve.matching import hard_labels, minimise, noise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.registry import import_modules

__all__ = [
    "ADAPTIVE",
    "ATTACKS",
    "GRNN",
    "IG",
    "Attack",
    "Budget",
    "Case",
    "Cosine",
    "Determined",
    "Engine",
    "Entered",
    "Errors",
    "Evidence",
    "FirstOrder",
    "FirstOrderSettings",
    "Inverse",
    "InvertingAttack",
    "Known",
    "Objective",
    "Outcome",
    "PixelSearch",
    "Problem",
    "Progress",
    "PublicPrior",
    "Reading",
    "ReadingBudget",
    "Reconstruction",
    "Refusal",
    "Run",
    "attack",
    "declared",
    "hard_labels",
    "has_attacker",
    "load_prior",
    "minimise",
    "noise",
    "reconstruct",
    "reconstruct_over_rounds",
]

import_modules(methods)
import_modules(adaptive)
