"""What an attack's class says of it is read everywhere: a plug-in joins every list of attacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bract.attacks import (
    ATTACKS,
    IG,
    Attack,
    Budget,
    Outcome,
    Problem,
    Reconstruction,
    Run,
    reconstruct,
)
from bract.attacks.base import Batches, Cost
from bract.attacks.methods.portfolio.auto import Auto
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.registry import attacks_only_for, closed_forms, families, title_of
from bract.attacks.solve.defaults import ModelDefault
from bract.config.audit import TIERS, Tier
from experiments.attack_catalogue import with_tables


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> type[Attack]:
    """An attack from another package, which knows the first digit."""

    @dataclass(frozen=True, kw_only=True)
    class Toy(Attack):
        name: ClassVar[str] = "toy"
        title: ClassVar[str] = "Toy"
        family: ClassVar[str] = "guessing"
        closed_form: ClassVar[bool] = True
        batches: ClassVar[Batches] = "one"
        tiers: ClassVar[tuple[Tier, ...]] = ("surrogate",)
        cost: ClassVar[Cost] = "instant"
        competes: ClassVar[bool] = True
        defaults: ClassVar[tuple[ModelDefault, ...]] = (
            ModelDefault("strength", "shallow", 2.0, "made up"),
        )

        strength: float | None = None

        def solve(self, problem: Problem, run: Run) -> Outcome:
            images = tiny[0][:1].expand(problem.trials, *problem.image_shape)
            labels = torch.nn.functional.one_hot(tiny[1][:1], 10)
            labels = labels.expand(problem.trials, 1, 10).float()
            losses = torch.zeros(problem.trials)
            curves: list[list[tuple[int, float]]] = [[] for _ in problem.cases]
            return Outcome(images, labels, losses, {}, curves, 1).made_by("")

    monkeypatch.setitem(ATTACKS._entries, "toy", Toy)
    return Toy


def test_a_plug_in_is_in_every_list_that_its_class_says(toy: type[Attack]) -> None:
    assert closed_forms()[:2] == ["analytic", "toy"]
    assert families()["guessing"] == ["toy"]
    assert title_of("toy") == "Toy"
    assert "toy" in attacks_only_for("surrogate")
    assert toy.competes and Auto().pool is None


@pytest.mark.parametrize("portfolio", [Best(), Auto(pool=("ig",))])
def test_a_portfolio_tries_a_plug_ins_closed_form_first(
    toy: type[Attack], observe: Any, tiny: Any, portfolio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ATTACKS._entries, "r-gap")
    seen = observe(tiny[0][:1], tiny[1][:1])
    (found,) = reconstruct(seen, portfolio, budget=Budget(iterations=1), device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.method == "toy"
    assert torch.equal(found.images, tiny[0][:1])


def test_a_plug_ins_default_by_model_is_used_and_recorded(
    toy: type[Attack], observe: Any, tiny: Any
) -> None:
    (found,) = reconstruct(observe(tiny[0][:1], tiny[1][:1]), "toy", device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.settings["strength"] == 2.0


def test_an_attack_that_extends_another_has_its_own_title_and_place() -> None:
    class Own(IG):
        name = "own"

    assert Own.family == IG.family and Own.defaults == IG.defaults
    assert Own.title == "" and not Own.competes
    assert IG.title == "IG" and IG.competes


def test_every_attack_of_bract_is_described() -> None:
    for name in ATTACKS:
        kind = ATTACKS[name]
        assert kind.title and kind.inputs and set(kind.tiers) <= set(TIERS), name
        assert bool(kind.family) != (kind.portfolio or name == "labels"), name


def test_an_unknown_name_is_its_own_title() -> None:
    assert title_of("of another machine") == "of another machine"


def test_the_documents_tables_are_those_of_the_classes() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide"
    attacks = (guide / "attacks.md").read_text()
    matching = (guide / "attacks" / "matching.md").read_text()
    assert with_tables(attacks) == attacks and with_tables(matching) == matching
    assert all(f"| `{name}` |" in attacks for name in ("ig", "r-gap", "auto"))
    assert "Ren et al. 2022: 1e-3" in matching
