"""The strategy registry: a strategy's name to the object that a configuration describes."""

from __future__ import annotations

from secrets import randbits
from typing import TYPE_CHECKING, Any

from bract.config import FederationConfig
from bract.config.config import FedBoostingConfig, StrategyConfig
from bract.errors import BractError
from bract.installed.plugins import blaming
from bract.installed.references import TrustedReference, import_reference
from bract.registry import Registry
from bract.seeds import derive_seed
from bract.strategies.closing import Closing
from bract.strategies.fedavg import FedAvg
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx

if TYPE_CHECKING:
    from bract.captures.aggregates import Aggregates

STRATEGIES: Registry[type[FedAvg]] = Registry("strategy")
STRATEGIES.register("fedavg")(FedAvg)
STRATEGIES.register("fedprox")(FedProx)
STRATEGIES.register("fedboosting")(FedBoosting)


def create_strategy(
    config: FederationConfig, *, first_round: int = 1, aggregates: Aggregates | None = None
) -> FedAvg:
    """Build the configured strategy, over ciphertexts where the federation encrypts.

    Parameters
    ----------
    first_round
        Number of the first round, above 1 where an interrupted run is resumed.
    aggregates
        Where an encrypted run keeps its aggregates; in memory if not given. Of masked sums they
        serve an audit alone.
    """
    section = config.strategy
    kind = own = strategy_class(section)
    # The other keys of a section are arguments of its strategy.
    options: dict[str, Any] = section.model_dump(
        exclude={"name", "timeout", "quorum", "grace", "joins"}
    )
    options |= {"min_nodes": config.clients, "first_round": first_round}
    if isinstance(section, FedBoostingConfig):
        # Clients know the run's seed, and must not know random weights.
        random = section.fusing == "random"
        options["seed"] = randbits(62) if random else derive_seed(config.seed, "boosting")
        options["validation_timeout"] = section.timeout
    if config.encryption.enabled:
        options |= {"aggregates": aggregates, "timeout": section.timeout}
    if config.encryption.uses_masks:
        from bract.strategies.masked.secure import masked

        options["config"] = config
        kind = masked(kind)
    elif config.encryption.enabled:
        # gmpy2 and phe are loaded by encrypted runs only.
        from bract.strategies.encrypted.secure import encrypted

        options["encryption"] = config.encryption
        kind = encrypted(kind)
    with blaming(own):
        strategy = kind(**options)
    # No arguments: strategies of packages do not take them.
    strategy.closing = Closing(section.quorum, section.grace)
    strategy.joins = section.joins
    strategy.update_dtype = config.training.update_dtype
    return strategy


def strategy_class(section: StrategyConfig) -> type[FedAvg]:
    """Return the strategy that a section configures, imported where a package adds it."""
    if not section.implementation:
        return STRATEGIES[section.name]
    # Of the installed package's own class: no configuration sets it.
    implementation = TrustedReference(section.implementation)
    kind = import_reference(implementation, what=f"strategy {section.name!r}:")
    if not (isinstance(kind, type) and issubclass(kind, FedAvg)):
        raise BractError(
            f"strategy {section.name!r}: {section.implementation} is no subclass of "
            "bract.strategies.FedAvg; extend it",
            code="config-value",
        )
    return kind
