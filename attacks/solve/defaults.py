"""Hyper-parameters that depend on the model, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bract.attacks.problem.model_traits import ModelTraits

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
        """Return whether the value is for a model with these traits."""
        return self.family == family_of(model) and self.rectified in (None, model.rectified)


def family_of(traits: ModelTraits) -> Family:
    """Return the family of a model by its depth: papers tune LeNets and residual networks apart."""
    return "shallow" if traits.shallow else "deep"
