"""Fixtures of the attacks, which scoring shares."""

from observing import _one_thread, digits, observe, tiny

__all__ = ["_one_thread", "digits", "observe", "tiny"]
