"""Attackers that know the defense and its hyper-parameters; importing this registers them."""

from bract.attacks.adaptive.adadefense import undo_adadefense
from bract.attacks.adaptive.fedkl import key_known, regress_lock
from bract.attacks.adaptive.guardian import undo_guardian
from bract.attacks.adaptive.noise import discount_noise
from bract.attacks.adaptive.precode import undo_precode
from bract.attacks.adaptive.pruning import match_survivors
from bract.attacks.adaptive.soteria import mute_pruned_features

__all__ = [
    "discount_noise",
    "key_known",
    "match_survivors",
    "mute_pruned_features",
    "regress_lock",
    "undo_adadefense",
    "undo_guardian",
    "undo_precode",
]
