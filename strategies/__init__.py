"""Federated strategies: how the server combines updates."""

from typing import TYPE_CHECKING, Any

from bract.strategies.fedavg import FedAvg, RoundOutcome
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx
from bract.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from bract.strategies.encrypted.own_app import Encrypted

__all__ = ["STRATEGIES", "Encrypted", "FedAvg", "FedBoosting", "FedProx", "RoundOutcome"]


def __getattr__(name: str) -> Any:
    if name != "Encrypted":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # gmpy2 and phe are loaded by encrypted runs only.
    from bract.strategies.encrypted.own_app import Encrypted

    return Encrypted
