"""What a client does with the model in one round, declared in one vocabulary.

The configuration's ``training`` section, the description of an app (``bract.yaml``) and the
declaration in a capture share these keys, types and ranges.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from bract.config.schedule import LrSchedule, scheduled_lr

MOST_EXAMPLES = 10**9
"""Largest number of examples that a client may claim; it decides the client's weight."""

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, le=MOST_EXAMPLES)]
Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Augmentations = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=16)
]
MOST_FACTORS = 4096
Factors = Annotated[tuple[NotNegative, ...], Field(max_length=MOST_FACTORS)]
Momenta = Annotated[tuple[Probability, ...], Field(max_length=MOST_FACTORS)]
Betas = tuple[Probability, Probability]
ClassWeights = Annotated[tuple[NotNegative, ...], Field(min_length=1, max_length=10_000)]


def printable_alone(text: str) -> str:
    """Return text as it is; a `ValueError` where a character of it cannot be printed."""
    if not text.isprintable():
        raise ValueError("expected printable characters alone")
    return text


class Section(BaseModel):
    """A section: an unknown key is an error, no value changes, and numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LocalWork(Section):
    """A client's local training; None where a value is not declared.

    Attributes
    ----------
    optimizer
        ``sgd``, ``adam`` or the name of another one.
    lr, lr_schedule
        Learning rate of round 1, and how later rounds' follow from it.
    momentum
        In [0, 1).
    weight_decay
        lambda >= 0: every step follows the gradient plus ``lambda w``.
    batch_size
        Examples of one step.
    local_epochs, local_steps
        Passes over the client's examples, or steps where these are given.
    augmentation
        What is done at random to every example before it is trained on, by name, in order.
    dropout
        Rate in [0, 1) of the model's dropout layers, or of one before the output layer where it
        has none. None: the model's own.
    """

    optimizer: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    lr: Rate | None = None
    lr_schedule: LrSchedule | None = None
    momentum: Probability | None = None
    weight_decay: NotNegative | None = None
    batch_size: Count | None = None
    local_epochs: Positive | None = None
    local_steps: Positive | None = None
    augmentation: Augmentations | None = None
    dropout: Probability | None = None

    def declared(self, server_round: int, rounds: int | None = None) -> dict[str, Any]:
        """Return the values of a client declaration of one round, by its field.

        ``lr`` is that round's. ``local_steps`` is left to the caller: where it follows from epochs
        it depends on the client's number of examples.

        Parameters
        ----------
        server_round
            From 1.
        rounds
            Rounds of the federation, for a cosine schedule that names none.
        """
        rate = self.lr
        if rate is not None and self.lr_schedule is not None:
            rate = scheduled_lr(rate, self.lr_schedule, server_round, rounds)
        return {
            "optimizer": self.optimizer,
            "lr": rate,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "batch_size": self.batch_size,
            "augmentation": None if self.augmentation is None else tuple(self.augmentation),
            "dropout": self.dropout,
        }
