"""Attackers that know the defense and its hyper-parameters; importing this registers them.

Every module of the folder is imported, and of a defense that has a folder its module of that name.
"""

import importlib
import pkgutil

from bract.attacks.adaptive.adadefense.adadefense import undo_adadefense
from bract.attacks.adaptive.adadefense.forward import simulate_adadefense
from bract.attacks.adaptive.fedkl.fedkl import regress_lock
from bract.attacks.adaptive.guardian.guardian import undo_guardian
from bract.attacks.adaptive.noise import weigh_noise
from bract.attacks.adaptive.precode import undo_precode
from bract.attacks.adaptive.pruning import bound_dropped, simulate_pruning
from bract.attacks.adaptive.soteria import mute_pruned_features

__all__ = [
    "bound_dropped",
    "mute_pruned_features",
    "regress_lock",
    "simulate_adadefense",
    "simulate_pruning",
    "undo_adadefense",
    "undo_guardian",
    "undo_precode",
    "weigh_noise",
]

for _module in pkgutil.iter_modules(__path__):
    _name = f"{__name__}.{_module.name}"
    importlib.import_module(f"{_name}.{_module.name}" if _module.ispkg else _name)
