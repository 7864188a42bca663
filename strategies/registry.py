"""The strategy registry: a strategy's name to the object that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _build(kind: type[FedAvg], config: FederationConfig, first_round: int, **own: Any) -> FedAvg:
    section = config.strategy
    options = {
        "server_lr": section.server_lr,
        "fraction": section.fraction,
        "min_nodes": config.clients,
        "tolerate_failures": section.tolerate_failures,
        "first_round": first_round,
        **own,
    }
    if not config.encryption.enabled:
        return kind(**options)
    # gmpy2 and phe are loaded by encrypted runs only.
    from bract.strategies.secure import encrypted

    return encrypted(kind)(encryption=config.encryption, timeout=section.timeout, **options)


@STRATEGIES.register("fedavg")
def _fedavg(config: FederationConfig, first_round: int) -> FedAvg:
    section = config.strategy
    assert isinstance(section, FedAvgConfig)
    return _build(
        FedAvg,
        config,
        first_round,
        weighting=section.weighting,
    )


@STRATEGIES.register("fedprox")
def _fedprox(config: FederationConfig, first_round: int) -> FedAvg:
    section = config.strategy
    assert isinstance(section, FedProxConfig)
    return _build(
        FedProx,
        config,
        first_round,
        proximal_mu=section.proximal_mu,
        weighting=section.weighting,
    )


@STRATEGIES.register("fedboosting")
def _fedboosting(config: FederationConfig, first_round: int) -> FedAvg:
    section = config.strategy
    assert isinstance(section, FedBoostingConfig)
    return _build(
        FedBoosting,
        config,
        first_round,
        weighting=section.weighting,
        signal=section.signal,
        fusing=section.fusing,
        p_hat=section.p_hat,
        seed=derive_seed(config.seed, "boosting"),
        validation_timeout=section.timeout,
    )
