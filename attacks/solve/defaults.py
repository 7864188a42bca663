"""Hyper-parameters that depend on the model under attack, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from bract.attacks.problem.model_traits import ModelTraits

Family = Literal["shallow", "deep"]

_Attack = TypeVar("_Attack")


@dataclass(frozen=True)
class ModelDefault:
    """The value of one setting of one attack for one family of models.

    Attributes
    ----------
    attack
        Registered name; attacks that extend it share the value.
    source
        Paper, code or measurement that it was taken from.
    rectified
        Whether it is for models with ReLU and the like, or for those without; None for both.
    """

    attack: str
    setting: str
    family: Family
    value: float
    source: str
    rectified: bool | None = None

    def suits(self, model: ModelTraits) -> bool:
        """Whether the value is for a model with these traits."""
        return self.family == family_of(model) and self.rectified in (None, model.rectified)


MODEL_DEFAULTS = (
    ModelDefault("grnn", "tv", "shallow", 2e-3, "Ren et al. 2022: 1e-3, which their code doubles"),
    ModelDefault("grnn", "tv", "deep", 2e-6, "Ren et al. 2022: 1e-6, which their code doubles"),
    ModelDefault(
        "ig",
        "tv",
        "shallow",
        1e-6,
        (
            "the paper's prior, weak enough for a fresh LeNet's cosine: two training digits 31 dB, "
            "86 dB without"
        ),
        rectified=False,
    ),
    ModelDefault(
        "ig",
        "tv",
        "shallow",
        0.1,
        (
            "ReLU: eight training photographs through the strided LeNet 23.3 dB, in batches of "
            "four 23.0 dB; 13.4 and 9.3 dB with 1e-6"
        ),
        rectified=True,
    ),
    ModelDefault("ig", "tv", "deep", 1e-4, "Geiping et al. 2020, published command line"),
    ModelDefault("gradinversion", "tv", "shallow", 1e-6, "as for IG: a fresh LeNet tells little"),
    ModelDefault(
        "gradinversion",
        "tv",
        "deep",
        0.1,
        "two training photographs through a fresh ResNet-20: 13.0 dB, 12.6 dB with 0.01",
    ),
    ModelDefault(
        "gradinversion",
        "group",
        "shallow",
        1e-4,
        "four restarts on four training photographs: 21.2 dB with 1e-3, 15.0 dB with 0.01",
    ),
    ModelDefault("gradinversion", "group", "deep", 0.01, "Yin et al. 2021"),
)


def family_of(traits: ModelTraits) -> Family:
    """Return the family of a model by its depth.

    The settings of the papers differ between LeNets and residual networks; a stranger's model
    takes those of the kind that it is like.
    """
    return "shallow" if traits.shallow else "deep"


def for_model(attack: _Attack, model: ModelTraits) -> _Attack:
    """Return the attack with the model's defaults in place of settings that are None."""
    names = {getattr(kind, "name", None) for kind in type(attack).__mro__}
    if not is_dataclass(attack):
        return attack
    untyped: Any = attack
    open_ = {f.name for f in fields(untyped) if getattr(untyped, f.name) is None}
    changes: dict[str, Any] = {
        default.setting: default.value
        for default in MODEL_DEFAULTS
        if default.attack in names and default.suits(model) and default.setting in open_
    }
    found: _Attack = replace(untyped, **changes)
    return found
