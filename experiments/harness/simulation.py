"""Federations in one process: bract's own strategies over clients that are plain objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedProx as FlowerFedProx
from flwr.serverapp.strategy import Strategy

from bract.errors import RunFailedError
from bract.protocol.fused import answer_fused
from bract.protocol.records import from_arrays, to_arrays
from bract.server.loopback import LoopbackGrid
from bract.strategies import FedAvg, FedBoosting
from bract.updates.update import Tensors


class Client(Protocol):
    """One client: its data and how it learns from them."""

    def train(
        self, arrays: Tensors, server_round: int, proximal_mu: float
    ) -> tuple[Tensors, int, dict[str, float]]:
        """Train on ``arrays``; return the local weights, the number of examples, and metrics."""

    def score(self, arrays: Tensors) -> tuple[float, float]:
        """Return loss and accuracy on the client's own validation split."""


STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "fedavg": lambda clients: FedAvg(min_nodes=clients),
    "fedavg-uniform": lambda clients: FedAvg(min_nodes=clients, weighting="uniform"),
    "fedprox": lambda clients: FlowerFedProx(
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
        proximal_mu=0.1,
    ),
    "fedboosting": lambda clients: FedBoosting(min_nodes=clients),
    "fedboosting-proportional": lambda clients: FedBoosting(
        min_nodes=clients, weighting="proportional"
    ),
    "fedboosting-loss": lambda clients: FedBoosting(
        min_nodes=clients, weighting="proportional", signal="loss"
    ),
}


def simulate(
    strategy: Strategy,
    clients: Sequence[Client],
    initial: Tensors,
    rounds: int,
    judge: Callable[[Tensors], float],
) -> list[dict[str, Any]]:
    """Train and return one row a round: ``accuracy`` by ``judge``, ``weights``, ``arrays``.

    Strategies that are not bract's do not tell their weights: an empty list stands for them.
    Where a client's training diverges the run ends there; the last row then holds ``diverged``.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("bract").setLevel(logging.CRITICAL)
    rows: list[dict[str, Any]] = []

    def after_round(number: int, arrays: Any) -> None:
        if number:
            tensors = from_arrays(arrays)
            row = {"round": number, "accuracy": judge(tensors), "arrays": tensors}
            outcome = strategy.outcome if isinstance(strategy, FedAvg) else None
            row["weights"] = list(outcome.weights) if outcome else []
            if outcome and outcome.boosting is not None:
                row["boosting"] = outcome.boosting.to_record().to_dict()
            rows.append(row)

    grid = LoopbackGrid(lambda i: _app(clients[i]), [{} for _ in clients])
    try:
        strategy.start(grid, to_arrays(initial), num_rounds=rounds, evaluate_fn=after_round)
    except RunFailedError as error:
        rows.append(
            {"round": len(rows) + 1, "accuracy": 0.0, "weights": [], "diverged": str(error)}
        )
    return rows


def _app(client: Client) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        config: dict[str, Any] = dict(message.content.config_records["config"])
        local, examples, metrics = client.train(
            from_arrays(message.content.array_records["arrays"]),
            int(config["server-round"]),
            float(config.get("proximal-mu", 0.0)),
        )
        content = RecordDict(
            {
                "arrays": to_arrays(local),
                "metrics": MetricRecord({"num-examples": examples, **metrics}),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate("fused")
    def fused(message: Message, context: Context) -> Message:
        del context
        return answer_fused(message, client.score, num_examples=0)

    return app
