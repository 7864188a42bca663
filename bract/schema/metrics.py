"""``metrics.jsonl``: one line a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bract.schema.record import Number, Public, Record, VersionedRecord

METRICS_SCHEMA: Literal[3] = 3


class GlobalRow(Record):
    """Loss and accuracy (in [0, 1]) of the global model.

    ``split`` names the data it was judged on: the server's test data, or what the ``clients`` who
    judged it in an encrypted run hold.
    """

    loss: Number = None
    accuracy: Number = None
    split: Literal["test", "validation"] = "test"
    clients: int | None = None


class ClientRow(Record):
    """What one client reported in one round.

    ``weight`` is its share of the aggregate and ``clipped`` counts values that encryption cut.
    ``other`` holds metrics by names of the client's own app.
    """

    num_examples: Public[int | None] = None
    weight: Public[Number] = None
    local_steps: Public[Number] = None
    seconds: Public[Number] = None
    defense_seconds: Public[Number] = None
    train_loss: Public[Number] = None
    train_accuracy: Public[Number] = None
    trained_loss: Public[Number] = None
    trained_accuracy: Public[Number] = None
    validation_loss: Public[Number] = None
    validation_accuracy: Public[Number] = None
    test_loss: Public[Number] = None
    test_accuracy: Public[Number] = None
    random_key_accuracy: Public[Number] = None
    clipped: Public[Number] = None
    encrypt_seconds: Public[Number] = None
    decrypt_seconds: Public[Number] = None
    other: dict[str, Number] = {}

    @classmethod
    def of(cls, metrics: Mapping[str, float], *, num_examples: int, weight: float) -> Self:
        """Return the row of a client that replied with these metrics."""
        known = set(cls.model_fields) - {"num_examples", "weight", "other"}
        return cls.model_validate(
            {name: value for name, value in metrics.items() if name in known}
            | {"other": {name: value for name, value in metrics.items() if name not in known}}
            | {"num_examples": num_examples, "weight": weight}
        )


class FailureRow(Record):
    """A client that did not answer usably, and why."""

    client: str
    reason: str


class LateRow(Record):
    """An answer that came after its ``round`` had closed, and was refused: what came."""

    client: str
    round: int
    reason: str


class BoostingRow(Record):
    """What FedBoosting measured in one round; every list is in the order of ``clients``.

    ``V[i][j]`` is the score of client i's fused model on client j's validation split, a column of
    None where client j did not answer usably. ``T`` holds the training scores.
    """

    clients: Public[list[str]]
    V: Public[list[list[Number]]]
    T: Public[list[Number]]
    weights: Public[list[float]]
    signal: Public[Literal["accuracy", "loss"]] = "accuracy"

    @model_validator(mode="after")
    def _square(self) -> Self:
        count = len(self.clients)
        if {len(self.V), len(self.T), len(self.weights), *map(len, self.V)} - {count}:
            raise ValueError(f"V, T and weights do not fit {count} clients")
        return self


class MetricsRow(VersionedRecord):
    """One round; round 0 is the model before training.

    ``seconds`` is what the round took and ``time`` when it ended, in seconds since the epoch.
    ``evaluation`` is called ``global`` in the file. ``late`` lists the answers to earlier rounds
    that came since the row before.
    """

    kind: ClassVar[str] = "metrics"

    schema_version: Literal[3] = Field(default=METRICS_SCHEMA, alias="schema")
    round: int
    seconds: Number = None
    time: Number = None
    evaluation: GlobalRow | None = Field(default=None, alias="global")
    clients: dict[str, ClientRow] = {}
    failures: list[FailureRow] = []
    late: list[LateRow] = []
    boosting: BoostingRow | None = None
