"""Models under attack, by name."""

from bract.models.initialise import INITIALISERS, initialise
from bract.models.lenet import LeNet, StridedLeNet
from bract.models.registry import MODELS, activation_layer, create_model

__all__ = [
    "INITIALISERS",
    "MODELS",
    "LeNet",
    "StridedLeNet",
    "activation_layer",
    "create_model",
    "initialise",
]
