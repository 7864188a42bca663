"""Fixtures of the attacks with public images."""

from observing import _one_thread, digits, observe, ticking, tiny

__all__ = ["_one_thread", "digits", "observe", "ticking", "tiny"]
