"""Federated strategies: how the server combines updates."""

from bract.strategies.aggregation import aggregate, fedavg_weights, fusing_weights
from bract.strategies.fedavg import FedAvg, RoundOutcome
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx
from bract.strategies.registry import STRATEGIES, create_strategy
from bract.strategies.scores import Boosting, boosting_weights

__all__ = [
    "STRATEGIES",
    "Boosting",
    "FedAvg",
    "FedBoosting",
    "FedProx",
    "RoundOutcome",
    "aggregate",
    "boosting_weights",
    "create_strategy",
    "fedavg_weights",
    "fusing_weights",
]
