"""Gradient inversion attacks on captured observations."""

from bract.attacks import adaptive
from bract.attacks.engine import Engine, Progress
from bract.attacks.evidence import ADAPTIVE, Evidence, Tier, evidence_for
from bract.attacks.grnn import GRNN
from bract.attacks.ig import IG
from bract.attacks.label_inference import LabelInference
from bract.attacks.matching import Attack
from bract.attacks.reconstruction import Budget, Reconstruction, Refusal, Restart
from bract.attacks.registry import ATTACKS, attack, reconstruct

__all__ = [
    "ADAPTIVE",
    "ATTACKS",
    "GRNN",
    "IG",
    "Attack",
    "Budget",
    "Engine",
    "Evidence",
    "LabelInference",
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
