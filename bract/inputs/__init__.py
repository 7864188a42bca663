"""What clients train on: one class a kind of input, by the name that a declaration gives."""

import sys

from bract.inputs.base import INPUTS, Input, References, Truth
from bract.registry import import_modules
from bract.schema.inputs import PrimaryScore, is_redacted

__all__ = ["INPUTS", "Input", "PrimaryScore", "References", "Truth", "is_redacted"]

import_modules(sys.modules[__name__])
