"""Federated strategies: how the server combines updates."""

from bract.strategies.aggregation import aggregate, fedavg_weights
from bract.strategies.fedavg import FedAvg, RoundOutcome

__all__ = ["FedAvg", "RoundOutcome", "aggregate", "fedavg_weights"]
