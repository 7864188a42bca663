"""What clients train on: one class a kind of input, by the name that a declaration gives."""

from bract.inputs import image as image
from bract.inputs.base import INPUTS, Input, References, Truth, input_of, kept_examples

__all__ = [
    "INPUTS",
    "Input",
    "References",
    "Truth",
    "input_of",
    "kept_examples",
]
