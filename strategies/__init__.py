"""Federated strategies: how the server combines updates.

The names below are imported when they are first used: this package alone loads neither torch nor
Flower, and gmpy2 and phe are loaded by encrypted runs only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.strategies.encrypted.own_app import Encrypted
    from bract.strategies.fedavg import FedAvg, RoundOutcome
    from bract.strategies.fedboosting import FedBoosting
    from bract.strategies.fedprox import FedProx
    from bract.strategies.registry import STRATEGIES

__all__ = ["STRATEGIES", "Encrypted", "FedAvg", "FedBoosting", "FedProx", "RoundOutcome"]

_PLACES = {
    "STRATEGIES": "bract.strategies.registry",
    "Encrypted": "bract.strategies.encrypted.own_app",
    "FedAvg": "bract.strategies.fedavg",
    "FedBoosting": "bract.strategies.fedboosting",
    "FedProx": "bract.strategies.fedprox",
    "RoundOutcome": "bract.strategies.fedavg",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
