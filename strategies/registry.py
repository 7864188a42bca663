"""The strategy registry: a strategy's name to the object that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable

from bract.config import (
    FedAvgConfig,
    FedBoostingConfig,
    FederationConfig,
    FedProxConfig,
)
from bract.registry import Registry
from bract.seeds import derive_seed
from bract.strategies.fedavg import FedAvg
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx

STRATEGIES: Registry[Callable[[FederationConfig, int], FedAvg]] = Registry("strategy")


def create_strategy(config: FederationConfig, *, first_round: int = 1) -> FedAvg:
    """Build the configured strategy.

    Parameters
    ----------
    first_round
        Number of the first round, above 1 where an interrupted run is resumed.
    """
    return STRATEGIES[config.strategy.name](config, first_round)


@STRATEGIES.register("fedavg")
def _fedavg(config: FederationConfig, first_round: int) -> FedAvg:
    section = config.strategy
    assert isinstance(section, FedAvgConfig)
    return FedAvg(
        weighting=section.weighting,
        server_lr=section.server_lr,
        fraction=section.fraction,
        min_nodes=config.clients,
        tolerate_failures=section.tolerate_failures,
        first_round=first_round,
    )


@STRATEGIES.register("fedprox")
def _fedprox(config: FederationConfig, first_round: int) -> FedAvg:
    section = config.strategy
    assert isinstance(section, FedProxConfig)
    return FedProx(
        proximal_mu=section.proximal_mu,
        weighting=section.weighting,
        server_lr=section.server_lr,
        fraction=section.fraction,
        min_nodes=config.clients,
        tolerate_failures=section.tolerate_failures,
        first_round=first_round,
    )


@STRATEGIES.register("fedboosting")
def _fedboosting(config: FederationConfig, first_round: int) -> FedAvg:
    section = config.strategy
    assert isinstance(section, FedBoostingConfig)
    return FedBoosting(
        weighting=section.weighting,
        signal=section.signal,
        fusing=section.fusing,
        p_hat=section.p_hat,
        seed=derive_seed(config.seed, "boosting"),
        validation_timeout=section.timeout,
        server_lr=section.server_lr,
        fraction=section.fraction,
        min_nodes=config.clients,
        tolerate_failures=section.tolerate_failures,
        first_round=first_round,
    )
