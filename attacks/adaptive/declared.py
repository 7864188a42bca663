"""What a protocol declares about a defense, checked before an attacker relies on it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bract.errors import BractError
from bract.observation import Observation


class Declared(BaseModel):
    """Public hyper-parameters of one defense; what is left out has the defense's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


D = TypeVar("D", bound=Declared)


def declared(kind: type[D], observation: Observation) -> D:
    """Read the hyper-parameters of the one declared defense.

    Raises
    ------
    BractError
        If one is unknown or out of range.
    """
    (entry,) = observation.protocol.defenses
    try:
        return kind(**{key: value for key, value in entry.items() if key != "name"})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BractError(
            f"{observation.key}: declared defense {entry.get('name')!r}, hyper-parameter {where}: "
            f"found {first['input']!r}; {first['msg']}; correct protocol.defenses"
        ) from error


def gradient_scale(observation: Observation) -> float:
    """Return the factor from an update to a gradient, as `Observation.gradient` applies it."""
    p = observation.protocol
    if p.algorithm == "fedsgd" or not p.lr or not p.local_steps:
        return 1.0
    return 1.0 / (p.lr * p.local_steps)
