"""Check what a protocol declares about a defense before an attacker relies on it."""

from __future__ import annotations

from typing import TypeVar

from bract.captures.observation import Observation
from bract.defenses.base import DefenseSpec
from bract.defenses.entries import read_settings
from bract.errors import BractError

S = TypeVar("S", bound=DefenseSpec)


def declared(kind: type[S], observation: Observation) -> S:
    """Read the hyper-parameters of the one declared defense; the rest has its defaults.

    Parameters
    ----------
    kind
        The defense, as the client protects with it: both read the same fields.
    """
    (entry,) = observation.declaration.defenses
    try:
        return read_settings(kind, entry)
    except BractError as error:
        raise BractError(
            f"{observation.key}: declared {error}; correct declaration.defenses", code=error.code
        ) from error
