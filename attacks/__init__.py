"""Gradient inversion attacks on captured observations."""
