"""Attackers that know the defense and its hyper-parameters; importing this registers them."""

from bract.attacks.adaptive.adadefense import undo_adadefense
from bract.attacks.adaptive.noise import discount_noise
from bract.attacks.adaptive import fedkl, precode
from bract.attacks.adaptive.pruning import match_survivors

__all__ = ["discount_noise", "match_survivors", "undo_adadefense"]
