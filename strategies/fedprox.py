"""FedProx (Li et al. 2020) over updates: FedAvg whose clients stay near the global model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from bract.errors import BractError
from bract.protocol.records import PROXIMAL_KEY
from bract.strategies.fedavg import MAX_SHARE, FedAvg


class FedProx(FedAvg):
    """Average the updates of clients whose loss has the term mu/2 ‖w - w_global‖².

    Sends what Flower's `flwr.serverapp.strategy.FedProx` sends, in the same key ``proximal-mu`` of
    the train message's config: the server only announces mu, the ClientApp adds the term. Unlike
    Flower's, it reads updates and can leave out failed clients.

    Parameters
    ----------
    proximal_mu
        mu >= 0; 0 is FedAvg.
    weighting, server_lr, max_share, fraction, min_nodes, tolerate_failures, first_round
        As in `FedAvg`.
    """

    def __init__(
        self,
        *,
        proximal_mu: float = 0.1,
        weighting: Literal["examples", "uniform"] = "examples",
        server_lr: float = 1.0,
        max_share: float = MAX_SHARE,
        fraction: float = 1.0,
        min_nodes: int = 2,
        tolerate_failures: bool = False,
        first_round: int = 1,
    ) -> None:
        super().__init__(
            weighting=weighting,
            server_lr=server_lr,
            max_share=max_share,
            fraction=fraction,
            min_nodes=min_nodes,
            tolerate_failures=tolerate_failures,
            first_round=first_round,
        )
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
