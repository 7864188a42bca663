"""``metrics.jsonl``: one line a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bract.schema.record import Number, Record, VersionedRecord, names

METRICS_SCHEMA: Literal[2] = 2


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

    num_examples: int | None = None
    weight: Number = None
    local_steps: Number = None
    seconds: Number = None
    defense_seconds: Number = None
    train_loss: Number = None
    train_accuracy: Number = None
    trained_loss: Number = None
    trained_accuracy: Number = None
    validation_loss: Number = None
    validation_accuracy: Number = None
    test_loss: Number = None
    test_accuracy: Number = None
    random_key_accuracy: Number = None
    clipped: Number = None
    encrypt_seconds: Number = None
    decrypt_seconds: Number = None
    other: dict[str, Number] = {}

    public: ClassVar[frozenset[str]] = names(
        """
        num_examples weight local_steps seconds defense_seconds train_loss train_accuracy
        trained_loss trained_accuracy validation_loss validation_accuracy test_loss
        test_accuracy random_key_accuracy clipped encrypt_seconds decrypt_seconds
        """
    )

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


class BoostingRow(Record):
    """What FedBoosting measured in one round; every list is in the order of ``clients``.

    ``V[i][j]`` is the score of client i's fused model on client j's validation split, a column of
    None where client j did not answer usably. ``T`` holds the training scores.
    """

    public: ClassVar[frozenset[str]] = names("clients V T weights signal")

    clients: list[str]
    V: list[list[Number]]
    T: list[Number]
    weights: list[float]
    signal: Literal["accuracy", "loss"] = "accuracy"

    @model_validator(mode="after")
    def _square(self) -> Self:
        count = len(self.clients)
        if {len(self.V), len(self.T), len(self.weights), *map(len, self.V)} - {count}:
            raise ValueError(f"V, T and weights do not fit {count} clients")
        return self


class MetricsRow(VersionedRecord):
    """One round; round 0 is the model before training.

    ``seconds`` is what the round took and ``time`` when it ended, in seconds since the epoch.
    ``evaluation`` is called ``global`` in the file.
    """

    kind: ClassVar[str] = "metrics"

    schema_version: Literal[2] = Field(default=METRICS_SCHEMA, alias="schema")
    round: int
    seconds: Number = None
    time: Number = None
    evaluation: GlobalRow | None = Field(default=None, alias="global")
    clients: dict[str, ClientRow] = {}
    failures: list[FailureRow] = []
    boosting: BoostingRow | None = None
