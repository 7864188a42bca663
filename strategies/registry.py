"""The strategy registry: a strategy's name to the object that a configuration describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bract.config import FedBoostingConfig, FederationConfig
from bract.registry import Registry
from bract.seeds import derive_seed
from bract.strategies.fedavg import FedAvg
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx

if TYPE_CHECKING:
    from bract.strategies.ledger import Ledger

STRATEGIES: Registry[type[FedAvg]] = Registry("strategy")
STRATEGIES.register("fedavg")(FedAvg)
STRATEGIES.register("fedprox")(FedProx)
STRATEGIES.register("fedboosting")(FedBoosting)


def create_strategy(
    config: FederationConfig, *, first_round: int = 1, ledger: Ledger | None = None
) -> FedAvg:
    """Build the configured strategy, over ciphertexts where the federation encrypts.

    Parameters
    ----------
    first_round
        Number of the first round, above 1 where an interrupted run is resumed.
    ledger
        Where an encrypted run keeps its aggregates; in memory if not given.
    """
    section, kind = config.strategy, STRATEGIES[config.strategy.name]
    # The other keys of a section are arguments of its strategy.
    options: dict[str, Any] = section.model_dump(exclude={"name", "timeout"})
    options |= {"min_nodes": config.clients, "first_round": first_round}
    if isinstance(section, FedBoostingConfig):
        options["seed"] = derive_seed(config.seed, "boosting")
        options["validation_timeout"] = section.timeout
    if not config.encryption.enabled:
        return kind(**options)
    # gmpy2 and phe are loaded by encrypted runs only.
    from bract.strategies.secure import encrypted

    return encrypted(kind)(
        encryption=config.encryption, ledger=ledger, timeout=section.timeout, **options
    )
