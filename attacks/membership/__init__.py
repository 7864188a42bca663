"""Attackers that decide whether a record was trained on, from uploads and global models."""

from bract.attacks.membership.attackers import (
    MEMBERSHIP,
    MembershipAttacker,
    ModelAttacker,
    ShadowAttacker,
)
from bract.attacks.membership.combined import combine
from bract.attacks.membership.measuring import LocalModel, global_model, local_model, logits_of
from bract.attacks.membership.references import Training, train_references, train_shadow
from bract.attacks.membership.shadows import parts
from bract.attacks.membership.view import ModelView, RoundView, losses

__all__ = [
    "MEMBERSHIP",
    "LocalModel",
    "MembershipAttacker",
    "ModelAttacker",
    "ModelView",
    "RoundView",
    "ShadowAttacker",
    "Training",
    "combine",
    "global_model",
    "local_model",
    "logits_of",
    "losses",
    "parts",
    "train_references",
    "train_shadow",
]
