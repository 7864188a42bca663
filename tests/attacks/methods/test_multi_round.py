"""Rounds that each took an unknown part of a client's images."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observing import scores
from refusals import refused

from bract import Observation
from bract.attacks import Budget, Problem, Reconstruction, reconstruct, reconstruct_over_rounds
from bract.attacks.methods.multi_round.merging import merge, merged_alike
from bract.attacks.methods.multi_round.multi_round import MultiRound, _Polish, reassign
from bract.attacks.methods.portfolio.halving import Configuration, Contest
from bract.attacks.problem.case import open_case
from bract.attacks.problem.joint_case import join_rounds
from bract.attacks.result import Trial
from bract.models import create_model
from bract.models.initialise import initialise

PARTS = ((0, 1), (2, 1), (0, 2))


def parts_of(observe: Any, tiny: Any, parts: Any = PARTS) -> list[Observation]:
    network = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    initialise(network, "default", 0)
    found = []
    for number, part in enumerate(parts, start=1):
        seen = observe(tiny[0][list(part)], tiny[1][list(part)], model=network)
        declaration = replace(seen.declaration, model="lenet-strided")
        found.append(replace(seen, round=number, declaration=declaration))
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.sub_(seen.update[name], alpha=0.5)
    return found


def found_in(images: Any, labels: Any, residual: float) -> Reconstruction:
    rows = torch.nn.functional.one_hot(torch.as_tensor(labels), 10).float()
    trial = Trial(images=images, label_probabilities=rows, loss=0.0, residual=residual)
    return Reconstruction(attack="ig", observation="", tier="oblivious", seed=0, trials=(trial,))


def test_copies_of_an_image_stand_in_the_pool_once_as_the_best_round_has_it() -> None:
    torch.manual_seed(0)
    a, b, c = torch.rand(3, 1, 8, 8)
    worse = (a + 0.05 * torch.rand(1, 8, 8)).clamp(0.0, 1.0)
    found = [
        found_in(torch.stack([worse, b]), [1, 1], 0.5),
        found_in(torch.stack([c, a]), [1, 1], 0.1),
        # Alike, and of another label.
        found_in(torch.stack([a]), [2], 0.9),
    ]
    images, labels, assigned = merge(found, 0.6)
    assert torch.equal(images, torch.stack([c, a, b, a]))
    assert labels.tolist() == [1, 1, 1, 2]
    assert assigned == ((1, 2), (0, 1), (3,))


def test_images_that_have_become_alike_are_merged_and_those_of_no_round_go() -> None:
    torch.manual_seed(0)
    a, b, c = torch.rand(3, 1, 8, 8)
    images = torch.stack([a, b, a, c, b])
    labels = torch.tensor([1, 1, 1, 1, 1])
    # The last two of one label are alike, but stand in one round together.
    kept, own, assigned = merged_alike(images, labels, ((0, 1), (2, 1), (1, 4)), 0.9)
    assert torch.equal(kept, torch.stack([a, b, b]))
    assert own.tolist() == [1, 1, 1]
    assert assigned == ((0, 1), (0, 1), (1, 2))


def test_a_round_takes_the_image_that_matches_it(observe: Any, tiny: Any) -> None:
    cases = [open_case(seen, tier="oblivious", max_images=8) for seen in parts_of(observe, tiny)]
    rows = torch.nn.functional.one_hot(tiny[1][:3], 10).float()
    wrong = ((0, 2), (2, 1), (1, 2))
    assert reassign(cases, wrong, tiny[0][:3], rows) == ((0, 1), (2, 1), (0, 2))


@pytest.mark.thorough
def test_parts_of_rounds_are_put_together(observe: Any, tiny: Any) -> None:
    using = MultiRound(inner="gauss-newton")
    found = reconstruct_over_rounds(
        parts_of(observe, tiny), using, budget=Budget(iterations=25), device="cpu"
    )
    assert found.attack == found.method == "multi-round"
    assert len(found.images) == 3
    assert found.settings["assigned"] and "3 rounds" in found.components
    assert sorted(found.labels.tolist()) == sorted(tiny[1][:3].tolist())
    assert min(float(row.psnr) for row in scores(found.images, tiny[0][:3])) > 40.0


def test_one_upload_is_attacked_as_the_inner_attack_does(observe: Any, tiny: Any) -> None:
    seen = parts_of(observe, tiny)[:1]
    budget = Budget(iterations=3)
    (found,) = reconstruct(seen, MultiRound(inner="ig"), budget=budget, device="cpu")
    (alone,) = reconstruct(seen, "ig", budget=budget, device="cpu")
    assert isinstance(found, Reconstruction) and isinstance(alone, Reconstruction)
    assert torch.equal(found.images, alone.images)


def test_it_does_not_run_itself() -> None:
    with refused("config-value", "multi-round"):
        MultiRound(inner="multi-round")


def test_a_budget_holds_for_all_parts(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Budget] = []
    fit = _Polish.run

    def noted(self: Any, cases: Any, task: Any) -> Any:
        begun.append(task.budget)
        return fit(self, cases, task)

    monkeypatch.setattr(_Polish, "run", noted)
    using = MultiRound(inner="gauss-newton")
    budget = Budget(iterations=2, seconds=50.0, restarts=3)
    found = reconstruct_over_rounds(parts_of(observe, tiny), using, budget=budget, device="cpu")
    assert found.pick.iterations <= 2
    # Three rounds and two fits at most; the fits of all restarts would be the same.
    assert {(part.seconds, part.restarts) for part in begun} == {(10.0, 1)}


def test_exchanged_images_are_simulated_in_parts(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [open_case(seen, tier="oblivious", max_images=8) for seen in parts_of(observe, tiny)]
    rows = torch.nn.functional.one_hot(tiny[1][:3], 10).float()
    wrong = ((0, 2), (2, 1), (1, 2))
    at_once: list[int] = []
    select = Problem.select

    def counted(self: Problem, trials: Any) -> Problem:
        at_once.append(len(trials))
        return select(self, trials)

    monkeypatch.setattr(Problem, "select", counted)
    monkeypatch.setattr("bract.attacks.methods.multi_round.multi_round._AT_ONCE", 1)
    assert reassign(cases, wrong, tiny[0][:3], rows) == ((0, 1), (2, 1), (0, 2))
    assert set(at_once) == {1}


def joint(parts: list[Observation]) -> Any:
    return join_rounds([open_case(seen, tier="oblivious", max_images=8) for seen in parts])


def test_auto_lets_it_compete_where_rounds_are_joined(observe: Any, tiny: Any) -> None:
    parts = parts_of(observe, tiny)
    assert MultiRound().suits(joint(parts))
    assert not MultiRound().suits(open_case(parts[0], tier="oblivious", max_images=8))


def test_a_contest_takes_it_where_no_images_of_all_rounds_explain_them() -> None:
    def trial(name: str, distance: float) -> Any:
        facts = {"failed": False, "nats": None, "statistics": None, "residual": 1.0, "restart": 0}
        facts["determined"] = None
        return SimpleNamespace(attack=name, method=name, distance=distance, loss=distance, **facts)

    def contest(distance: float) -> Contest:
        configurations = [Configuration(name, 0) for name in ("best", "ig", "multi-round")]
        trials = [trial("best", 0.5), trial("ig", distance), trial("multi-round", 0.001)]
        return Contest(configurations, trials)

    parts, alike = contest(0.2), contest(0.01)
    assert parts.best() == 2 and alike.best() == 1
    for one in (parts, alike):
        one.halve(1)
    assert [one.attack for one in parts.configurations] == ["ig", "multi-round"]
    assert [one.attack for one in alike.configurations] == ["ig"]


@pytest.mark.thorough
def test_auto_picks_it_where_rounds_took_parts_of_the_images(observe: Any, tiny: Any) -> None:
    found = reconstruct_over_rounds(parts_of(observe, tiny), "auto", budget=Budget(iterations=60))
    assert found.pick.attack == "multi-round"
