from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from bract.attacks import IG, Budget, Engine, Refusal, attack, reconstruct
from bract.attacks.methods.baselines import prior_only
from bract.audit.questions.reconstruction.scores.image import psnr
from bract.models import MODELS

BUDGET = Budget(iterations=150)


def test_one_digit_is_recovered_from_one_gradient(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    found = IG()(observe(images, labels, init="uniform"), budget=BUDGET)
    assert found.images.shape == (1, 1, 8, 8)
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert found.labels.tolist() == labels.tolist()
    assert float(psnr(found.images, images)[0]) > 25
    assert found.gradient_cosine is not None
    assert found.gradient_cosine > 0.999


def test_without_the_gradient_nothing_is_recovered(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    found = prior_only(IG())(observe(images, labels, init="uniform"), budget=BUDGET)
    assert float(psnr(found.images, images)[0]) < 12


def test_the_same_seed_gives_the_same_images_and_another_gives_others(
    observe: Any, digits: Any
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    budget = Budget(iterations=20)
    first = IG()(seen, budget=budget, seed=3)
    assert torch.equal(first.images, IG()(seen, budget=budget, seed=3).images)
    assert not torch.equal(first.images, IG()(seen, budget=budget, seed=4).images)


def test_the_blind_pick_is_the_restart_with_the_lowest_loss(observe: Any, tiny: Any) -> None:
    found = IG()(observe(tiny[0][:1], tiny[1][:1]), budget=Budget(iterations=30, restarts=3))
    losses = [restart.loss for restart in found.trials]
    best = losses.index(min(losses))
    assert len(losses) == 3
    assert found.final_loss == losses[best]
    assert torch.equal(found.images, found.trials[best].images)
    assert found.settings["restart"] == best


def test_the_loss_belongs_to_the_images_it_is_reported_with(observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    engine = Engine()
    found = IG(tv=0.0)(seen, budget=Budget(iterations=40))
    assert found.gradient_cosine is not None
    assert found.final_loss == pytest.approx(1 - found.gradient_cosine, rel=1e-2, abs=1e-6)
    assert engine.device == "cpu"


def test_trials_run_together_as_they_run_alone(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:3], digits[1][:3]
    seen = [observe(images[i : i + 1], labels[i : i + 1], client=f"client-{i}") for i in range(3)]
    budget = Budget(iterations=5, restarts=2)
    together = reconstruct(seen, IG(signed=False), budget=budget, engine=Engine(trials=6))
    alone = reconstruct(seen, IG(signed=False), budget=budget, engine=Engine(trials=1))
    for one, other in zip(together, alone, strict=True):
        assert not isinstance(one, Refusal)
        assert not isinstance(other, Refusal)
        assert torch.allclose(one.images, other.images, atol=1e-3)


def test_a_batch_of_two_is_recovered_with_its_labels(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][1:3], tiny[1][1:3]
    found = IG(tv=1e-5)(
        observe(images, labels, init="uniform"), budget=Budget(iterations=150, restarts=2)
    )
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())
    assert found.images.shape == (2, 1, 8, 8)


def test_an_unusable_observation_is_refused_by_name_and_the_others_go_on(
    observe: Any, digits: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    good = observe(images, labels)
    broken = observe(images, labels, client="broken")
    broken.update["classifier.1.bias"][0] = float("nan")
    results = reconstruct([broken, good], "ig", budget=Budget(iterations=2), device="cpu")
    assert isinstance(results[0], Refusal)
    assert "broken" in results[0].reason
    assert "classifier.1.bias" in results[0].reason
    assert not isinstance(results[1], Refusal)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"model": "lenet"}, ("model-mismatch", "classifier.3.weight")),
        ({"model": None}, ("declaration-lacks",)),
        (
            {"loss": "binary_cross_entropy"},
            ("declaration-wrong", "binary_cross_entropy"),
        ),
        ({"classes": 4}, ("model-mismatch", "classifier.1.weight")),
        (
            {"batch_size": None, "num_examples": None},
            ("declaration-lacks", "batch_size", "num_examples"),
        ),
    ],
)
def test_a_protocol_that_does_not_fit_is_refused_with_the_reason(
    observe: Any, digits: Any, declared: Any, said: tuple[str, ...]
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    seen = replace(seen, declaration=seen.declaration.updated(declared))
    with refused(*said):
        IG()(seen, budget=Budget(iterations=1))


def test_a_missing_layer_and_a_zero_update_are_refused(observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    zero = {name: torch.zeros_like(value) for name, value in seen.update.items()}
    with refused("attack-evidence", "coordinate"):
        IG()(type(seen)(1, "c", seen.parameters, zero, seen.declaration))
    del seen.update["features.0.weight"]
    with refused("capture-lacks", "features.0.weight"):
        IG()(seen)


def test_max_images_limits_what_is_searched_for(observe: Any, digits: Any) -> None:
    found = IG()(observe(digits[0][:4], digits[1][:4]), budget=Budget(iterations=2, max_images=2))
    assert len(found.images) == 2


def test_an_attack_is_built_by_name_and_a_wrong_setting_is_named() -> None:
    assert attack("ig", tv=0.5) == IG(tv=0.5)
    with refused("config-key", "tv"):
        attack("ig", tvv=0.5)
    with refused("unknown-name", "igg"):
        attack("igg")


def test_progress_ends_at_one_and_seconds_limit_the_run(
    observe: Any, digits: Any, ticking: Any
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    reported: list[Any] = []
    found = IG()(seen, budget=Budget(seconds=5.0), progress=reported.append)
    assert reported[-1].fraction == 1.0
    assert 1 < found.iterations <= 5


class Normed(nn.Module):
    """One convolution with batch normalisation."""

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(784, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(images)
        return result


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_normalisation_is_simulated_in_the_declared_mode(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-normed", Normed)
    torch.manual_seed(0)
    network = Normed(classes=10, channels=1, image_size=16).train(mode == "train")
    other = "eval" if mode == "train" else "train"
    declared = {"model": "test-normed", "batch_size": 2}
    right = observe(digits[0][:2], digits[1][:2], model=network).declaration
    seen = observe(digits[0][:2], digits[1][:2], model=network)
    seen = replace(seen, declaration=right.updated({**declared, "norm_mode": mode}))
    wrong = replace(seen, declaration=right.updated({**declared, "norm_mode": other}))
    budget = Budget(iterations=60, restarts=2)
    matched = IG(tv=0.0)(seen, budget=budget).gradient_residual
    mistaken = IG(tv=0.0)(wrong, budget=budget).gradient_residual
    assert matched is not None and mistaken is not None
    assert matched < 0.5 * mistaken


def test_budgets_refuse_nonsense() -> None:
    with refused("config-value", "budget.restarts", 0):
        Budget(restarts=0)
