"""Models under attack, by name."""

import sys

from bract.models.registry import MODELS, activation_layer, create_model
from bract.registry import import_modules

__all__ = ["MODELS", "activation_layer", "create_model"]

import_modules(sys.modules[__name__])
