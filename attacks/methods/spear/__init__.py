"""Factoring the gradient of a batch behind a linear layer."""
