"""FedBoosting's exchange: fused models to every client, scores back. One message a client.

The contract, for a third-party ClientApp. The strategy sends a message of type
``evaluate.fused``; its content holds the model to score i = 0..N-1 as array record ``fused-i``,
with the names and shapes of the record ``arrays`` of a train message, and the config record
``config`` with ``server-round`` and ``models`` = N. The reply holds a metric record ``metrics``
with ``accuracy`` and ``loss``, each a list of N floats in the order of the models (the one that
the strategy's ``signal`` names is enough), measured on the client's own validation split, and
``num-examples``. With `answer_fused` the handler is::

    @app.evaluate("fused")
    def evaluate_fused(message, context):
        model, images, labels = ...
        def score(tensors):
            model.load_state_dict(tensors)
            return loss, accuracy
        return answer_fused(message, score, num_examples=len(labels))

Every client gets the same records, and Flower stores and sends equal content once, so the N
models travel to the SuperLink once a round and to each client once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from bract.errors import BractError, one_line, shown
from bract.protocol.records import CONFIG, METRICS, NUM_EXAMPLES_KEY, from_arrays
from bract.updates.update import Tensors

FUSED_TYPE = "evaluate.fused"
MODELS_KEY = "models"
TRAINING_SCORE_KEY = "training-score"
TRAINING_SCORES = ("trained_accuracy", "trained_loss")
"""Metrics of a train reply that FedBoosting reads T from."""


def write_fused(models: Sequence[ArrayRecord], config: ConfigRecord) -> RecordDict:
    """Build the content that every validator receives."""
    content = RecordDict({f"fused-{i}": model for i, model in enumerate(models)})
    content[CONFIG] = ConfigRecord({**config, MODELS_KEY: len(models)})
    return content


def answer_fused(
    message: Message,
    score: Callable[[Tensors], tuple[float, float]],
    *,
    num_examples: int,
    signal: str | None = None,
) -> Message:
    """Score every fused model of ``message`` and build the reply.

    Parameters
    ----------
    score
        Maps parameters and buffers to ``(loss, accuracy)`` on the client's validation split. The
        models are decoded one after another, so one is in memory at a time.
    num_examples
        Size of the validation split.
    signal
        ``accuracy`` or ``loss``: the one that is sent; None sends both.
    """
    arrays = message.content.array_records
    config = message.content.config_records.get(CONFIG)
    count = None if config is None else config.get(MODELS_KEY)
    if not isinstance(count, int) or isinstance(count, bool):
        raise BractError(
            f"the server announced {shown(count)} fused models, expected a number",
            code="message-malformed",
        )
    # Only the first that is missing is looked for: the number is the server's word.
    missing = next((name for i in range(count) if (name := f"fused-{i}") not in arrays), None)
    if missing:
        raise BractError(
            f"the server announced {shown(count)} fused models, but sent no {missing}",
            code="message-malformed",
        )
    scores = [score(from_arrays(arrays[f"fused-{i}"])) for i in range(count)]
    found = {
        "loss": [float(loss) for loss, _ in scores],
        "accuracy": [float(accuracy) for _, accuracy in scores],
    }
    sent = {name: values for name, values in found.items() if signal in (name, None)}
    metrics = MetricRecord({**sent, NUM_EXAMPLES_KEY: num_examples})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def read_scores(message: Message, signal: str) -> list[float]:
    """Read one validator's scores, ``accuracy`` or ``loss``, in the order of the models."""
    records = message.content.metric_records
    for record in records.values():
        found = record.get(signal)
        try:
            if isinstance(found, list):
                return [float(value) for value in found]
            if isinstance(found, int | float):
                return [float(found)]
        except (ArithmeticError, TypeError, ValueError):
            raise BractError(
                f"sent {signal} {shown(found)}, expected numbers", code="message-malformed"
            ) from None
    held = sorted(key for record in records.values() for key in record)
    raise BractError(
        f"the reply to {FUSED_TYPE} holds no metric {signal!r}, a list with one number a model; "
        f"found {one_line(', '.join(held) or 'no metrics', 200)}",
        code="message-malformed",
    )
