"""Partially homomorphic encryption of model updates."""
