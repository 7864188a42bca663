"""Gradient inversion attacks on captured observations.

Every module of `bract.attacks.methods` and `bract.attacks.adaptive` is imported here, so an attack
in one file there registers without a line elsewhere.
"""

from bract.attacks import adaptive, methods
from bract.attacks.adaptive.declared import declared, gradient_scale
from bract.attacks.base import Attack, Attacker
from bract.attacks.methods.analytic import Analytic
from bract.attacks.methods.coarse_to_fine import CoarseToFine
from bract.attacks.methods.dlg import DLG, IDLG
from bract.attacks.methods.gauss_newton import GaussNewton
from bract.attacks.methods.gradinversion.gradinversion import GradInversion
from bract.attacks.methods.grnn.grnn import GRNN
from bract.attacks.methods.grnn.grnn_polish import GRNNPolish
from bract.attacks.methods.ig import IG
from bract.attacks.methods.label_inference import LabelInference
from bract.attacks.methods.portfolio.portfolio import Auto, Best
from bract.attacks.methods.r_gap.r_gap import RGAP
from bract.attacks.methods.spear.spear import Spear
from bract.attacks.methods.statistics import Statistics
from bract.attacks.methods.surrogate.ggl import GGL
from bract.attacks.methods.surrogate.gias import GIAS
from bract.attacks.methods.surrogate.learned_inverter import LearnedInverter
from bract.attacks.problem.case import Case
from bract.attacks.problem.evidence import ADAPTIVE, Evidence
from bract.attacks.problem.global_models import observe_global_models
from bract.attacks.problem.joint_case import join_rounds
from bract.attacks.problem.objectives import Cosine, Objective, RelativeError, SquaredError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.problem.trained_prior import TrainedPrior, load_prior
from bract.attacks.registry import ATTACKS, attack, reconstruct, reconstruct_over_rounds
from bract.attacks.result import Budget, Reconstruction, Refusal, Trial
from bract.attacks.solve.descent import Outcome, Plateau, Run
from bract.attacks.solve.engine import Engine, Progress
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.matching import certain_labels, hard_labels, minimise, noise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.attacks.solve.regularizers import TotalVariation
from bract.attacks.task import AttackTask, evidence_for, open_cases, open_over_rounds
from bract.registry import import_modules
from bract.schema import Tier

__all__ = [
    "ADAPTIVE",
    "ATTACKS",
    "DLG",
    "GGL",
    "GIAS",
    "GRNN",
    "IDLG",
    "IG",
    "RGAP",
    "Analytic",
    "Attack",
    "AttackTask",
    "Attacker",
    "Auto",
    "BatchedLBFGS",
    "Best",
    "Budget",
    "Case",
    "CoarseToFine",
    "Cosine",
    "Engine",
    "Evidence",
    "FirstOrder",
    "FirstOrderSettings",
    "GRNNPolish",
    "GaussNewton",
    "GradInversion",
    "LabelInference",
    "LearnedInverter",
    "Objective",
    "Outcome",
    "PixelSearch",
    "Plateau",
    "Problem",
    "Progress",
    "Reconstruction",
    "Refusal",
    "RelativeError",
    "Run",
    "Spear",
    "SquaredError",
    "Statistics",
    "TargetModel",
    "Tier",
    "TotalVariation",
    "TrainedPrior",
    "Trial",
    "adaptive",
    "attack",
    "certain_labels",
    "declared",
    "evidence_for",
    "gradient_scale",
    "hard_labels",
    "join_rounds",
    "load_prior",
    "methods",
    "minimise",
    "noise",
    "observe_global_models",
    "open_cases",
    "open_over_rounds",
    "reconstruct",
    "reconstruct_over_rounds",
    "target_model_of",
]

import_modules(methods)
import_modules(adaptive)
