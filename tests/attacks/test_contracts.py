"""The contract that every attack keeps, bract's own and those of other packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pack
import pytest
import torch
from refusals import refused

from bract.attacks import ATTACKS, Attack, Outcome, Problem, Run, hard_labels
from bract.attacks.checks import CHECKS, Check, Trial, check_attack

SMALLER: dict[str, dict[str, int]] = {"lamp": {"rounds": 2, "orders": 4}}
"""Settings of attacks that spend more than their budget's iterations on a restart."""


def rows() -> Iterator[Any]:
    """Yield each attack with a standard upload of its inputs and a check.

    Every check is made on the first upload of an input, or the one that the attack reconstructs;
    the first check alone on the others, which are thorough.
    """
    for attack in sorted(ATTACKS):
        for kind in ATTACKS[attack].inputs:
            standard = pack.STANDARD.get(kind, ())
            whole = pack.whole(attack, kind)
            for name in dict.fromkeys((*standard, *filter(None, [whole]))):
                for check in CHECKS if name == whole else CHECKS[:1]:
                    title = f"{attack}-{name}-{check.__name__}"
                    marks = () if name == whole else pytest.mark.thorough
                    yield pytest.param(attack, name, check, id=title, marks=marks)


@pytest.mark.parametrize(("attack", "name", "check"), list(rows()))
def test_every_attack_keeps_the_contract(attack: str, name: str, check: Check) -> None:
    check(trial(attack, name))


@lru_cache(maxsize=1)
def trial(attack: str, name: str) -> Trial:
    """Return an attack's trial on an upload; the checks of one share what it found."""
    kind = ATTACKS[attack]
    public = pack.prior(kind.generator or "autoencoder") if kind.tiers == ("surrogate",) else None
    return Trial(attack=kind(**SMALLER.get(attack, {})), upload=pack.upload(name), public=public)


def pairs() -> Iterator[Any]:
    """Yield each attack with an upload; all but one upload of an input are thorough."""
    for attack, name in pack.pairs():
        whole = {pack.whole(attack, kind) for kind in ATTACKS[attack].inputs}
        yield pytest.param(attack, name, marks=() if name in whole else pytest.mark.thorough)


@pytest.mark.parametrize(("attack", "name"), list(pairs()))
def test_no_attack_reaches_less_than_the_pack_says(attack: str, name: str) -> None:
    wanted = pack.expected()[attack][name]
    if "score" in wanted:
        found = pack.reached(attack, name)
        assert found.get("score", 0.0) >= wanted["score"] - wanted["tolerance"], (found, wanted)
    else:
        found = pack.reached(attack, name, iterations=1)
        assert ("refused" in found) == ("refused" in wanted), (found, wanted)


def test_every_attack_reconstructs_an_upload_on_which_all_is_checked() -> None:
    for attack in sorted({name for name, _ in pack.pairs()}):
        for kind in ATTACKS[attack].inputs:
            name = pack.whole(attack, kind)
            assert name is not None
            assert "refused" not in pack.expected()[attack].get(name, {}), (attack, name)


def test_the_pack_is_small_and_holds_no_result_without_an_upload() -> None:
    size = sum(path.stat().st_size for path in pack.ROOT.rglob("*") if path.is_file())
    assert size <= 10 * 2**20
    listed = {(attack, name) for attack, found in pack.expected().items() for name in found}
    assert listed == set(pack.pairs())


@dataclass(frozen=True, kw_only=True)
class Grey(Attack):
    """An attack of another package: even grey images, with faults that a subclass adds."""

    name: ClassVar[str] = "grey"

    def solve(self, problem: Problem, run: Run) -> Outcome:
        images = torch.full((problem.trials, *problem.image_shape), 0.5)
        return Outcome(images, hard_labels(problem), torch.zeros(problem.trials), iterations=1)


@dataclass(frozen=True, kw_only=True)
class Undefined(Grey):
    def solve(self, problem: Problem, run: Run) -> Outcome:
        found = super().solve(problem, run)
        return replace(found, images=found.images * float("nan"))


@dataclass(frozen=True, kw_only=True)
class Restless(Grey):
    def solve(self, problem: Problem, run: Run) -> Outcome:
        return replace(super().solve(problem, run), iterations=1000)


@dataclass(frozen=True, kw_only=True)
class Random(Grey):
    def solve(self, problem: Problem, run: Run) -> Outcome:
        found = super().solve(problem, run)
        return replace(found, images=torch.rand(found.images.shape))


@dataclass(frozen=True, kw_only=True)
class Mixing(Grey):
    def solve(self, problem: Problem, run: Run) -> Outcome:
        found = super().solve(problem, run)
        return replace(found, images=found.images / problem.trials)


@dataclass(frozen=True, kw_only=True)
class Writing(Grey):
    def solve(self, problem: Problem, run: Run) -> Outcome:
        for value in problem.cases[0].observation.update.values():
            value.zero_()
        return super().solve(problem, run)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (Undefined, "not finite"),
        (Restless, "1000 iterations"),
        (Random, "second run"),
        (Mixing, "companions"),
        (Writing, "changed"),
    ],
)
def test_a_plug_in_that_breaks_the_contract_is_refused(kind: type[Grey], fault: str) -> None:
    check_attack(Grey())
    with pytest.raises(AssertionError, match=f"attack grey on round-0001/made-up: .*{fault}"):
        check_attack(kind())


def test_the_plug_in_of_the_documents_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "plugin")
    attack: Any = importlib.import_module("bract_example.attack")
    check_attack(attack.FromGrey())


def test_an_input_without_an_upload_is_asked_for() -> None:
    with refused("data-empty", "token-span", "text"):
        check_attack("token-span")
