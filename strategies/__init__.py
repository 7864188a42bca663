"""Federated strategies: how the server combines updates."""

from bract.strategies.fedavg import FedAvg, RoundOutcome
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx
from bract.strategies.registry import STRATEGIES

__all__ = ["STRATEGIES", "FedAvg", "FedBoosting", "FedProx", "RoundOutcome"]
