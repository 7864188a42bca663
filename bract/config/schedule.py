"""The clients' learning rate as a function of the round, by server and clients alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bract.registry import unknown

__all__ = [
    "SCHEDULES",
    "ConstantRate",
    "CosineRate",
    "ExponentialRate",
    "LrSchedule",
    "StepRate",
    "scheduled_lr",
]

Rounds = Annotated[int, Field(ge=1)]
Factor = Annotated[float, Field(gt=0.0, le=1.0)]


class _Schedule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ConstantRate(_Schedule):
    """The same rate in every round."""

    kind: Literal["constant"]


class StepRate(_Schedule):
    """The rate times ``factor`` after every ``every`` rounds."""

    kind: Literal["step"]
    factor: Factor = 0.1
    every: Rounds = 10


class ExponentialRate(_Schedule):
    """The rate times ``factor`` after every round."""

    kind: Literal["exponential"]
    factor: Factor = 0.95


class CosineRate(_Schedule):
    """Half a cosine from the rate towards ``floor`` (Loshchilov and Hutter 2017, equation 5).

    It would reach ``floor`` in the round after the last one of ``rounds``, and stays there. None:
    the rounds of the federation.
    """

    kind: Literal["cosine"]
    floor: Annotated[float, Field(ge=0.0)] = 0.0
    rounds: Rounds | None = None


SCHEDULES: Mapping[str, type[_Schedule]] = {
    "constant": ConstantRate,
    "step": StepRate,
    "cosine": CosineRate,
    "exponential": ExponentialRate,
}


def _kind_alone(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value
    section = {"kind": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping) or not isinstance(section.get("kind"), str):
        raise ValueError(
            f"expected {', '.join(SCHEDULES)}, or kind: one of these, and its settings"
        )
    if section["kind"] not in SCHEDULES:
        raise ValueError(unknown("schedule", section["kind"], SCHEDULES))
    return section


LrSchedule = Annotated[
    Annotated[ConstantRate | StepRate | CosineRate | ExponentialRate, Field(discriminator="kind")],
    BeforeValidator(_kind_alone, json_schema_input_type=Any),
]


def scheduled_lr(
    lr: float, schedule: LrSchedule, server_round: int, rounds: int | None = None
) -> float:
    """Return the learning rate of one round.

    Parameters
    ----------
    lr
        Rate of the first round.
    server_round
        From 1; an earlier one counts as the first.
    rounds
        Rounds of the federation, for a cosine that names none itself. None holds that cosine at
        ``lr``, since its length is unknown.
    """
    passed = max(server_round, 1) - 1
    match schedule:
        case StepRate():
            return float(lr * schedule.factor ** (passed // schedule.every))
        case ExponentialRate():
            return float(lr * schedule.factor**passed)
        case CosineRate():
            length = schedule.rounds or rounds
            share = min(1.0, passed / length) if length else 0.0
            return schedule.floor + (lr - schedule.floor) * (1.0 + math.cos(math.pi * share)) / 2.0
    return lr
