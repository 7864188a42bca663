"""The baseline of an attack: itself with nothing to match."""

from __future__ import annotations

from bract.attacks.base import Attacker
from bract.errors import BractError


def prior_only(attack: Attacker) -> Attacker:
    """The same attack with nothing to match: its start and its prior make the image."""
    found = attack.prior()
    if found is None:
        raise BractError(
            f"attack {attack.name!r} makes no image without a gradient to match",
            code="config-value",
        )
    return found
