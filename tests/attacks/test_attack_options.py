"""Settings of attacks are checked in one place, by name, type and range."""

import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from refusals import refused

from bract.attacks import ATTACKS, IG, Attack, Outcome, Problem, Run, attack
from bract.attacks.methods.maui.maui import Maui
from bract.attacks.options import Count, _checks
from bract.errors import BractError

if TYPE_CHECKING:
    from decimal import Decimal


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_every_field_of_every_attack_is_checked_and_its_defaults_pass(name: str) -> None:
    kind = ATTACKS[name]
    defaults = {f.name: getattr(attack(name), f.name) for f in fields(kind)}
    assert set(_checks(kind)) == set(defaults)
    assert kind(**defaults) == attack(name)


@pytest.mark.parametrize(
    ("name", "setting", "value", "expected"),
    [
        ("maui", "tv", "0.5", "a number"),
        ("maui", "tv", -1, "0 or more"),
        ("maui", "starts", 0, "1 or more"),
        ("maui", "starts", 2.0, "a whole number"),
        ("maui", "starts", True, "a whole number"),
        ("ig", "lr", 0, "above 0"),
        ("ig", "lr", float("nan"), "a number"),
        ("ig", "tv", [1.0], "or None"),
        ("ig", "unroll", -1, "1 or more"),
        ("ig", "signed", 1, "true or false"),
        ("ig", "schedule", "steep", "'cosine'"),
        ("ig", "objective", 3, "Objective"),
        ("coarse-to-fine", "shares", (0.5, 0.5), "3 of them"),
    ],
)
def test_a_wrong_value_is_refused_by_attack_setting_found_and_expected(
    name: str, setting: str, value: Any, expected: str
) -> None:
    with pytest.raises(BractError) as error:
        ATTACKS[name](**{setting: value})
    text = str(error.value)
    assert text.startswith(f"attack {name}: {setting} is {value!r}; expected ")
    assert expected in text


@pytest.mark.parametrize("kind", [Maui, IG])
def test_an_unknown_setting_is_refused_with_the_nearest_one(kind: type[Attack]) -> None:
    with refused("config-key", kind.name, "tvv", "tv"):
        kind(tvv=0.1)  # type: ignore[call-arg]


def test_settings_are_checked_when_they_are_replaced_and_copies_are_equal() -> None:
    with refused("config-value", "-1"):
        replace(Maui(), tv=-1.0)
    assert copy.deepcopy(Maui(tv=0.25)) == Maui(tv=0.25)


def test_a_plugin_is_checked_but_for_fields_that_only_a_type_checker_knows() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Theirs(Attack):
        name: ClassVar[str] = "theirs"

        passes: Count = 1
        weight: "Decimal | None" = None

        def solve(self, problem: Problem, run: Run) -> Outcome:
            raise NotImplementedError

    with refused("config-value", "theirs", "passes", 0):
        Theirs(passes=0)
    assert Theirs(weight=None, passes=2).passes == 2
