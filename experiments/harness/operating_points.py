"""The defenses as every table runs them, by the name of their row.

Leakage and accuracy of one row are those of one entry of `POINTS`. Guardian needs more than a name:
with the defaults its cosine follows from the update's norm. The performance metric pulls with a
force of that norm, the privacy metric with one of at most beta over delta's: the longer the update,
the less it is turned. The gradient of one digit leaves a fresh strided LeNet at 0.85, a pooled one
at 0.30, and the updates that train them at others again (``guardian_cosines.py`` measures it). With
``beta`` 1000, the largest of the paper, and three times the step every update that was measured
ends on the floor ``min_cosine``: the attacked gradient and the training update have one cosine.
"""

from typing import Any

Chain = list[dict[str, Any]]


def guardian_at(cosine: float) -> Chain:
    """Return Guardian with settings under which updates end on the floor ``cosine``."""
    return [{"name": "guardian", "beta": 1000.0, "lr": 3e-3, "min_cosine": cosine}]


GUARDIAN: dict[str, Chain] = {
    "guardian": [{"name": "guardian"}],
    "guardian, cosine 0.85": guardian_at(0.85),
    "guardian, cosine 0.5": guardian_at(0.5),
    "guardian, cosine 0.3": guardian_at(0.3),
}
"""Guardian with its defaults, and held at one cosine whatever it is given."""

POINTS: dict[str, Chain] = {
    "none": [],
    "adadefense": [{"name": "adadefense"}],
    # Alpha is public and divided out by an attacker: what leaks is as above. 0.02 trained the
    # sigmoid strided LeNet best of 0.005, 0.01 and 0.02, three seeds, on digits set apart.
    "adadefense, alpha 0.02": [{"name": "adadefense", "alpha": 0.02}],
    "adadefense, eps outside": [{"name": "adadefense", "eps_placement": "outside"}],
    **GUARDIAN,
    "fedkl": [{"name": "fedkl"}],
    "fedkl, ReLU": [{"name": "fedkl", "relu": True}],
    # Clipping is a part of `noise`, which wants some: 1e-9 is none.
    "clipping": [{"name": "noise", "std": 1e-9}],
    "noise 0.001": [{"name": "noise", "std": 1e-3}],
    "noise 0.01": [{"name": "noise", "std": 1e-2}],
    "pruning": [{"name": "pruning"}],
    "soteria": [{"name": "soteria"}],
    "precode": [{"name": "precode"}],
    "adadefense, noise 0.001": [{"name": "adadefense"}, {"name": "noise", "std": 1e-3}],
    "pruning, noise 0.001": [{"name": "pruning"}, {"name": "noise", "std": 1e-3}],
}
"""Every row's defenses, in the order of the tables."""
