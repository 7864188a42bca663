"""The schema of signals: channels, length, the range of the values, and what is predicted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from bract.config.work import printable_alone

MOST_CHANNELS = 512
"""Most channels of a schema, such as the leads of an electrocardiogram."""

MOST_LENGTH = 1 << 16
"""Most values of a channel."""

MOST_HORIZON = 4096
"""Most values that a forecast predicts."""

Layout = Literal["channels-first", "time-first", "flat"]

_CONFIG = ConfigDict(extra="forbid")

_Value = Annotated[float, Field(allow_inf_nan=False, ge=-1e18, le=1e18)]
_Spread = Annotated[float, Field(gt=0.0, le=1e18, allow_inf_nan=False)]
_Values = Annotated[tuple[_Value, ...], Field(min_length=1, max_length=MOST_CHANNELS)]


@dataclass(frozen=True, config=_CONFIG)
class SignalSchema:
    """What a signal is, the same at every client: values over time in one or more channels.

    A value v of a channel is ``(v - low) / (high - low)`` in [0, 1] of an example
    ``(channels, 1, length)``; the model sees ``(v - mean) / std``.

    Attributes
    ----------
    channels, length
        Channels, and values of each.
    low, high
        Range of the values in ``unit``, one for all channels or one a channel. An attacker knows
        it, and keeps to it.
    mean, std
        Of the values, one for all channels or one a channel: the model sees ``(v - mean) / std``.
        The default sees values as they are.
    unit
        Of the values, such as ``mV``; empty where they have none.
    rate
        Values a second; None counts time in steps.
    layout
        How the model takes a batch: ``channels-first`` as ``(B, channels, length)`` (convolutions),
        ``time-first`` as ``(B, length, channels)`` (recurrent layers), ``flat`` as ``(B, length)``
        of one channel.
    task
        ``classification``: a class a signal. ``forecast``: the next ``horizon`` values, with the
        mean squared error.
    horizon
        Outputs of a model that forecasts; 1 for the other task.
    """

    channels: Annotated[int, Field(ge=1, le=MOST_CHANNELS)]
    length: Annotated[int, Field(ge=2, le=MOST_LENGTH)]
    low: _Values = (0.0,)
    high: _Values = (1.0,)
    mean: _Values = (0.0,)
    std: Annotated[tuple[_Spread, ...], Field(min_length=1, max_length=MOST_CHANNELS)] = (1.0,)
    unit: Annotated[str, Field(max_length=32), AfterValidator(printable_alone)] = ""
    rate: _Spread | None = None
    layout: Layout = "channels-first"
    task: Literal["classification", "forecast"] = "classification"
    horizon: Annotated[int, Field(ge=1, le=MOST_HORIZON)] = 1

    @model_validator(mode="after")
    def _fits(self) -> SignalSchema:
        for name in ("low", "high", "mean", "std"):
            count = len(getattr(self, name))
            if count not in (1, self.channels):
                raise ValueError(
                    f"{name} has {count} values for {self.channels} channels; give one a channel, "
                    "or one for all"
                )
        for low, high in zip(self.lows, self.highs, strict=True):
            if not low < high:
                raise ValueError(f"the range goes from {low:g} to {high:g}; give low below high")
        if self.layout == "flat" and self.channels != 1:
            raise ValueError(f"the layout flat has one channel, the schema {self.channels}")
        if self.task == "classification" and self.horizon != 1:
            raise ValueError(f"horizon is {self.horizon} and the task is no forecast")
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an example, ``(channels, 1, length)``."""
        return self.channels, 1, self.length

    @property
    def lows(self) -> tuple[float, ...]:
        """Least value of each channel."""
        return self._each(self.low)

    @property
    def highs(self) -> tuple[float, ...]:
        """Greatest value of each channel."""
        return self._each(self.high)

    @property
    def objective(self) -> Literal["cross_entropy", "mse"]:
        """Name of the loss, of `bract.models.losses`."""
        return "mse" if self.task == "forecast" else "cross_entropy"

    @property
    def outputs(self) -> int | None:
        """Outputs of a model for one signal; None for a classifier, whose classes decide."""
        return self.horizon if self.task == "forecast" else None

    def feature_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel, whose values are in [0, 1]."""
        ranges = list(zip(self.lows, self.highs, strict=True))
        return (
            tuple(
                (m - a) / (b - a) for m, (a, b) in zip(self._each(self.mean), ranges, strict=True)
            ),
            tuple(s / (b - a) for s, (a, b) in zip(self._each(self.std), ranges, strict=True)),
        )

    def _each(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values * self.channels if len(values) == 1 else values
