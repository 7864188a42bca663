"""The strategy of a third-party app, over ciphertexts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from bract.config import build_config
from bract.errors import BractError
from bract.protocol.records import NUM_EXAMPLES_KEY
from bract.strategies.encrypted.secure import EncryptedFedAvg


class Encrypted(EncryptedFedAvg):
    """Average the encrypted updates of an app whose clients are `EncryptedClientApp`.

    The wrapped strategy chooses the clients of a round and their train config; its own average is
    replaced by the sum of ciphertexts, so only those that average as Flower's FedAvg does are
    taken. The server holds no model: ``evaluate_fn`` is not called, and the result's ``arrays`` are
    empty. Clients evaluate the final model; `final` has their metrics (`bract.client`).

    Examples
    --------
    ::

        strategy = Encrypted(FedAvg(fraction_evaluate=0.5), clients=3)

    Parameters
    ----------
    strategy
        Flower's FedAvg or a subclass.
    clients
        Clients of the run; all are waited for.
    tolerate_failures
        Whether a round goes on without clients that fail.
    encryption
        Fields of `bract.config.EncryptionConfig`, the same as the clients'.
    """

    def __init__(
        self,
        strategy: FlowerFedAvg,
        *,
        clients: int,
        tolerate_failures: bool = False,
        **encryption: Any,
    ) -> None:
        kind = type(strategy)
        for method in ("start", "aggregate_train"):
            if getattr(kind, method, None) is not getattr(FlowerFedAvg, method):
                raise BractError(
                    f"Encrypted: {kind.__name__} has its own {method}, which needs plain updates; "
                    "ciphertexts can only be averaged: give a strategy that averages as Flower's "
                    "FedAvg",
                    code="config-conflict",
                )
        if strategy.weighted_by_key != NUM_EXAMPLES_KEY:
            raise BractError(
                f"Encrypted: weighted_by_key is {strategy.weighted_by_key!r}, expected "
                f"{NUM_EXAMPLES_KEY!r}",
                code="config-conflict",
            )
        config = build_config(
            {"clients": clients, "encryption": {**encryption, "scheme": "paillier"}}
        )
        super().__init__(
            encryption=config.encryption,
            min_nodes=clients,
            fraction=strategy.fraction_train,
            tolerate_failures=tolerate_failures,
            max_share=1.0,
        )
        self.strategy = strategy
        for caution in config.encryption.cautions(clients, "fedavg"):
            logging.getLogger("flwr").warning("bract: %s", caution)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        **more: Any,
    ) -> Result:
        """Run the rounds; ``evaluate_fn`` has no model to evaluate."""
        if evaluate_fn is not None:
            logging.getLogger("flwr").warning(
                "bract: evaluate_fn is not called: the server of an encrypted run holds no model; "
                "the clients evaluate the final one"
            )
        result = super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, **more
        )
        result.arrays = ArrayRecord()
        return result

    def _sample(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(number, arrays, config, grid)
