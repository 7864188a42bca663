"""What clients train on: one class a kind of input, by the name that a declaration gives."""

import sys

from bract.inputs.base import INPUTS, Input, References, Truth, input_of, kept_examples
from bract.registry import import_modules
from bract.schema.inputs import PrimaryScore, is_redacted

__all__ = [
    "INPUTS",
    "Input",
    "PrimaryScore",
    "References",
    "Truth",
    "input_of",
    "is_redacted",
    "kept_examples",
]

import_modules(sys.modules[__name__])
