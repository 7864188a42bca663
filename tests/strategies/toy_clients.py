"""A ClientApp of a stranger's for one-parameter models, with every answer laid down in advance."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from bract.protocol.records import from_arrays, to_arrays
from bract.server.loopback import LoopbackGrid

Validate = Callable[[int, Sequence[float]], Mapping[str, Any]]


def by_row(rows: Sequence[Sequence[float]]) -> Validate:
    """Client j answers with column j of V."""
    return lambda client, _: {"accuracy": [row[client] for row in rows]}


def toy_app(
    updates: Sequence[float],
    validate: Validate | None = None,
    *,
    training: Sequence[float | None] | None = None,
    examples: Sequence[int] | None = None,
) -> Callable[[int], ClientApp]:
    """Client i moves ``w`` by ``-updates[i]``; ``validate(j, models)`` gives its scores."""

    def make(client: int) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            w = from_arrays(message.content.array_records["arrays"])["w"]
            metrics: dict[str, Any] = {"num-examples": examples[client] if examples else 1}
            score = training[client] if training else 0.5
            if score is not None:
                metrics["train_accuracy"] = score
            content = RecordDict(
                {
                    "arrays": to_arrays({"w": w - updates[client]}),
                    "metrics": MetricRecord(metrics),
                }
            )
            return Message(content, reply_to=message)

        if validate is not None:

            @app.evaluate("fused")
            def fused(message: Message, context: Context) -> Message:
                records = message.content.array_records
                config: dict[str, Any] = dict(message.content.config_records["config"])
                models = [
                    float(from_arrays(records[f"fused-{i}"])["w"]) for i in range(config["models"])
                ]
                answer = MetricRecord(dict(validate(client, models)))
                return Message(RecordDict({"metrics": answer}), reply_to=message)

        return app

    return make


def toy_arrays(value: float = 0.0) -> ArrayRecord:
    """The model: one parameter ``w`` of shape (1,)."""
    return to_arrays({"w": torch.tensor([value], dtype=torch.float64)})


def toy_grid(app: Callable[[int], ClientApp], clients: int, **options: Any) -> LoopbackGrid:
    """Nodes 1..clients."""
    return LoopbackGrid(app, [{} for _ in range(clients)], **options)


def value_of(arrays: ArrayRecord) -> float:
    """The parameter ``w``."""
    return float(from_arrays(arrays)["w"])
