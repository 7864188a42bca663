"""Fixtures of observations, as the attacks have them."""

from observing import _one_thread, digits, observe, tiny

__all__ = ["_one_thread", "digits", "observe", "tiny"]
