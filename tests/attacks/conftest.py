"""Fixtures of the attacks."""

from observing import _one_thread, digits, observe, ticking, tiny

__all__ = ["_one_thread", "digits", "observe", "ticking", "tiny"]
