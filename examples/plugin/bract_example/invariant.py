"""An invariant: every client of this app trains its first layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from bract.audit.description.invariants import Invariant
from bract.captures.observation import Observation


class FirstLayerMoves(Invariant):
    """The first parameter of an upload moves."""

    name: ClassVar[str] = "first-layer-moves"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Return a reason where the update of the first parameter is zero."""
        del earlier
        first = next(iter(observation.update), None)
        if first is None or bool(observation.update[first].any()):
            return None
        return f"{first} did not move, and this app trains it"
