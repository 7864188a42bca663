"""Gradient inversion attacks on captured observations."""

from bract.attacks import adaptive
from bract.attacks.analytic import Analytic
from bract.attacks.best import Best
from bract.attacks.choice import Auto
from bract.attacks.descent import Plateau
from bract.attacks.dlg import DLG, IDLG
from bract.attacks.engine import Engine, Progress
from bract.attacks.evidence import ADAPTIVE, Evidence, Tier, evidence_for
from bract.attacks.gauss_newton import GaussNewton
from bract.attacks.grnn import GRNN
from bract.attacks.ig import IG
from bract.attacks.label_inference import LabelInference
from bract.attacks.matching import Attack, Attacker
from bract.attacks.polish import GRNNPolish
from bract.attacks.reconstruction import Budget, Reconstruction, Refusal, Restart
from bract.attacks.registry import ATTACKS, attack, reconstruct

__all__ = [
    "ADAPTIVE",
    "ATTACKS",
    "DLG",
    "GRNN",
    "IDLG",
    "IG",
    "Analytic",
    "Attack",
    "Attacker",
    "Auto",
    "Best",
    "Budget",
    "Engine",
    "Evidence",
    "GRNNPolish",
    "GaussNewton",
    "LabelInference",
    "Plateau",
    "Progress",
    "Reconstruction",
    "Refusal",
    "Restart",
    "Tier",
    "adaptive",
    "attack",
    "evidence_for",
    "reconstruct",
]
