"""Federated strategies: how the server combines updates."""
