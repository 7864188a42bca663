"""FedProx (Li et al. 2020) over updates: FedAvg whose clients stay near the global model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from bract.errors import BractError
from bract.protocol.records import PROXIMAL_KEY
from bract.strategies.fedavg import FedAvg


class FedProx(FedAvg):
    """Average the updates of clients whose loss has the term mu/2 ‖w - w_global‖².

    Sends what Flower's `flwr.serverapp.strategy.FedProx` sends, in the same key ``proximal-mu`` of
    the train message's config: the server only announces mu, the ClientApp adds the term. Unlike
    Flower's, it reads updates and can leave out failed clients.

    Parameters
    ----------
    proximal_mu
        mu >= 0; 0 is FedAvg.
    options
        As `FedAvg` takes them.
    """

    def __init__(self, *, proximal_mu: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        if not proximal_mu >= 0.0:
            raise BractError(
                f"proximal_mu: found {proximal_mu}; expected a number from 0", code="config-value"
            )
        self.proximal_mu = proximal_mu

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Announce mu and ask a sample of the nodes to train on ``arrays``."""
        config[PROXIMAL_KEY] = float(self.proximal_mu)
        return super().configure_train(server_round, arrays, config, grid)
