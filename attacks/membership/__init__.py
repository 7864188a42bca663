"""Attackers that decide whether a record was trained on, from uploads and global models."""

from bract.attacks.membership.attackers import MEMBERSHIP, MembershipAttacker
from bract.attacks.membership.combined import combine
from bract.attacks.membership.measuring import LocalModel, local_model, logits_of
from bract.attacks.membership.references import Training, train_references
from bract.attacks.membership.view import RoundView

__all__ = [
    "MEMBERSHIP",
    "LocalModel",
    "MembershipAttacker",
    "RoundView",
    "Training",
    "combine",
    "local_model",
    "logits_of",
    "train_references",
]
