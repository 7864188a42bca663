"""Stages of `best`, in which attacks take part by saying so on their class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage of `best`.

    Attributes
    ----------
    name
        In words.
    share
        Share of the budget that it takes; 0 for a stage that takes none of it.
    own_steps
        Whether an attack takes the steps of its own default, and not its share of the budget's.
    guesses
        Whether a prior decides its images, which are then kept whatever their loss.
    """

    name: str
    share: float
    own_steps: bool = False
    guesses: bool = False


READ_OFF = Stage("closed form", 0.0)
"""Closed forms that explain an update of one image (`Attacker.closed_form`, `Attacker.batches`)."""

READINGS = Stage("readings", 0.7)
"""Readings of a layer that determine images (`bract.attacks.InvertingAttack`)."""

STATISTICS = Stage("statistics", 0.5)
"""Other parts of a capture that determine images, such as batch statistics."""

SOLVE = Stage("solve", 0.3, own_steps=True)
"""Equations of the whole update, solved to rounding."""

GENERATE = Stage("generate", 1.0, guesses=True)
"""Matching where many images match about equally well."""

STAGES = (READ_OFF, READINGS, STATISTICS, SOLVE, GENERATE)
"""All of them, in order."""
