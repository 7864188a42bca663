"""A defense that sends a share of the update, and the attacker who knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from bract.attacks import ADAPTIVE, Evidence, Known, declared
from bract.captures.observation import Observation
from bract.defenses import Defense, ProtectContext, Stage


class Half(Defense):
    """Send a share of the update.

    Parameters
    ----------
    share
        What is left of every coordinate.
    """

    name: ClassVar[str] = "half"
    title: ClassVar[str] = "{share} of the update"
    summary: ClassVar[str] = "a share of every coordinate"
    stage: ClassVar[Stage] = Stage.TRANSFORM

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5

    def protect(
        self, update: Mapping[str, Tensor], state: dict[str, Tensor], context: ProtectContext
    ) -> dict[str, Tensor]:
        """Return the share of the update."""
        return {name: self.share * value for name, value in update.items()}


@ADAPTIVE.register("half")
def undo_half(observation: Observation, known: Known) -> Evidence:
    """Divide by the share that the protocol declares."""
    half = declared(Half, observation)
    wanted = observation.gradient()
    return Evidence(
        target={name: wanted[name] / half.share for name in observation.parameters},
        notes={"defense": "half", "method": "divided by the declared share"},
    )
