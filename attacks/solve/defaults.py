"""Hyper-parameters that depend on the model, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bract.attacks.problem.model_traits import ModelTraits
from bract.errors import BractError, shown

Family = Literal["shallow", "deep"]


@dataclass(frozen=True)
class ModelDefault:
    """Value of a setting for one family of models.

    Attributes
    ----------
    source
        Paper, code or measurement that it was taken from.
    rectified
        Whether it is for models with ReLU and the like, or for those without; None for both.
    """

    setting: str
    family: Family
    value: float
    source: str
    rectified: bool | None = None

    def suits(self, model: ModelTraits) -> bool:
        """Whether the value is for a model with these traits."""
        return self.family == family_of(model) and self.rectified in (None, model.rectified)


def family_of(traits: ModelTraits) -> Family:
    """Return the family of a model by its depth: papers tune LeNets and residual networks apart."""
    return "shallow" if traits.shallow else "deep"


def require_count(attack: str, setting: str, value: object) -> None:
    """Refuse a setting that is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BractError(
            f"attack {attack}: {setting} is {shown(value)}; expected a whole number, 1 or more"
        )
