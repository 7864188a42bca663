import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from observing import scores
from refusals import refused
from torch import Tensor
from torch.func import vmap

from bract.attacks import ADAPTIVE, Budget, Evidence
from bract.attacks.methods.gauss_newton import GaussNewton
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import BatchGradient
from bract.attacks.solve import levenberg_marquardt
from bract.process import clock
from bract.scores import psnr


@pytest.mark.parametrize("init", ["default", pytest.param("uniform", marks=pytest.mark.slow)])
def test_a_smooth_network_gives_away_the_image_to_float_precision(
    observe: Any, digits: Any, init: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    found = GaussNewton()(observe(images, labels, init=init))
    assert float(psnr(found.images, images)[0]) > 70
    assert found.final_loss < 1e-12
    assert found.iterations < 30


def test_a_colour_image_is_solved_for_in_every_channel(observe: Any) -> None:
    torch.manual_seed(0)
    images = torch.rand(1, 3, 8, 8)
    found = GaussNewton()(observe(images, torch.tensor([4]), init="uniform"))
    assert float(psnr(found.images, images)[0]) > 50


def test_restarts_stop_at_the_first_that_solves_the_update(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    solve = levenberg_marquardt.levenberg_marquardt

    def counted(*arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        return solve(*arguments, **settings)

    monkeypatch.setattr("bract.attacks.methods.gauss_newton.levenberg_marquardt", counted)
    found = GaussNewton()(observe(tiny[0][:1], tiny[1][:1]), budget=Budget(restarts=5))
    assert len(calls) == 1
    assert len(found.trials) == 5


@pytest.mark.thorough
def test_directions_are_taken_together_as_the_memory_allows(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = []

    def counted(column: Any) -> Any:
        def run(part: Tensor) -> Tensor:
            together.append(len(part))
            found: Tensor = vmap(column)(part)
            return found

        return run

    monkeypatch.setattr(levenberg_marquardt, "vmap", counted)
    seen = observe(tiny[0][:1], tiny[1][:1])
    whole = GaussNewton()(seen, budget=Budget(iterations=3))
    pixels = tiny[0][0].numel()
    assert set(together) == {pixels}
    together.clear()
    monkeypatch.setattr(levenberg_marquardt, "_WORKING", 2**20)
    apart = GaussNewton()(seen, budget=Budget(iterations=3))
    assert 1 <= max(together) < pixels
    assert torch.allclose(apart.images, whole.images, atol=1e-5)


def test_a_budget_in_seconds_ends_in_the_middle_of_a_step(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, taken = itertools.count(), []
    change = levenberg_marquardt._change

    def counted(*arguments: Any) -> Any:
        taken.append(1)
        return change(*arguments)

    monkeypatch.setattr(levenberg_marquardt, "_change", counted)
    monkeypatch.setattr(levenberg_marquardt, "_WORKING", 1)
    with clock.timed_by(lambda: float(next(ticks))):
        found = GaussNewton()(observe(tiny[0][:1], tiny[1][:1]), budget=Budget(seconds=60))
    assert len(taken) < tiny[0][0].numel()
    assert found.images.isfinite().all()


def test_too_many_pixels_are_refused_with_the_mend(observe: Any, digits: Any) -> None:
    with refused("attack-unsuited", 512, "max_images"):
        GaussNewton(max_unknowns=300)(observe(digits[0][:2], digits[1][:2]))


@pytest.mark.thorough
def test_best_solves_smooth_models_and_generates_elsewhere(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    solved = Best()(observe(images, labels), budget=Budget(iterations=50))
    assert scores(solved.images, images)[0].psnr > 70
    assert solved.iterations <= 40
    several = observe(digits[0][:2], digits[1][:2], model="lenet")
    assert Best()(several, budget=Budget(iterations=50)).iterations >= 50


def test_max_pooling_is_a_kink(observe: Any, digits: Any) -> None:
    for model, smooth in (("lenet", False), ("lenet-strided", True)):
        seen = observe(digits[0][:1], digits[1][:1], model=model)
        case = open_case(seen, tier="oblivious", max_images=1, unroll=1)
        assert case.target_model.traits.smooth is smooth


@dataclass(frozen=True)
class Scaled(BatchGradient):
    """A client that multiplies everything by a factor it keeps to itself."""

    def unknowns(self, target_model: Any, trials: Any, generators: Any) -> Any:
        return {"factor": torch.ones(trials, 1)}

    def __call__(
        self,
        target_model: Any,
        parameters: Any,
        buffers: Any,
        inputs: Any,
        labels: Any,
        unknowns: Any,
    ) -> Any:
        plain = super().__call__(target_model, parameters, buffers, inputs, labels, {})
        factor = unknowns["factor"]
        return {n: v * factor.view(-1, *[1] * (v.dim() - 1)) for n, v in plain.items()}


def test_an_adaptive_attacker_finds_what_the_client_kept_secret(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    plain = observe(images, labels, init="uniform")
    seen = replace(
        plain,
        update={name: 3.0 * value for name, value in plain.update.items()},
        declaration=plain.declaration.updated({"defenses": [{"name": "test-scaling"}]}),
    )

    def view(observation: Any, known: Any) -> Any:
        return Evidence(target=observation.gradient(), forward=Scaled(), notes={"tried": 1})

    monkeypatch.setitem(ADAPTIVE._entries, "test-scaling", view)

    oblivious = GaussNewton()(seen)
    adaptive = GaussNewton()(seen, tier="adaptive")
    assert float(psnr(oblivious.images, images)[0]) < 30
    assert float(psnr(adaptive.images, images)[0]) > 60
    assert adaptive.settings["evidence"] == {"tried": 1}


def test_a_defense_without_an_adaptive_attacker_is_refused_by_name(
    observe: Any, digits: Any
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    seen = replace(
        seen, declaration=seen.declaration.updated({"defenses": [{"name": "unheard-of"}]})
    )
    with refused("unknown-name", "unheard-of"):
        GaussNewton()(seen, tier="adaptive")


def test_untrusted_coordinates_are_left_out_of_the_match(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    seen = observe(images, labels, init="uniform")
    spoiled = {name: value.clone() for name, value in seen.update.items()}
    spoiled["features.2.weight"][:6] = 7.0
    seen = replace(
        seen,
        update=spoiled,
        declaration=seen.declaration.updated({"defenses": [{"name": "test-spoiled"}]}),
    )
    trust = torch.ones_like(spoiled["features.2.weight"])
    trust[:6] = 0.0

    def view(observation: Any, known: Any) -> Any:
        return Evidence(target=observation.gradient(), weights={"features.2.weight": trust})

    monkeypatch.setitem(ADAPTIVE._entries, "test-spoiled", view)

    assert float(psnr(GaussNewton()(seen, tier="adaptive").images, images)[0]) > 60
