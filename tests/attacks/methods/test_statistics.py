"""Inverting the batch statistics that a client returns."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import one_step, scores
from refusals import refused
from torch import nn
from torch.nn import functional as F

from bract.attacks import Budget, Problem, attack
from bract.attacks.methods.portfolio.auto import Auto
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.methods.statistics import MATCHED, Statistics
from bract.attacks.problem.case import open_case
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.models import create_model

BUDGET = Budget(iterations=150)


def problem_of(seen: Any) -> Any:
    case = open_case(seen, tier="oblivious", max_images=4, unroll=16)
    return Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def photograph() -> Any:
    """A grey photograph of 16 pixels."""
    import skimage.data

    picture = torch.from_numpy(skimage.data.astronaut()[:128, 160:288]).float().mean(dim=2) / 255
    return F.interpolate(picture[None, None], size=(16, 16), mode="area")


@pytest.fixture
def kinked(photograph: Any) -> Any:
    """One step on the photograph through ReLU, and the photograph: 1,376 statistics."""
    seen = one_step(photograph, torch.tensor([3]), activation="relu", model="resnet20")
    return seen, photograph


@pytest.fixture
def no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what reads activations, which comes before the statistics."""
    monkeypatch.setattr(Problem, "through_depth", False)


def test_the_error_is_zero_at_the_truth_and_nowhere_else(kinked: Any) -> None:
    seen, image = kinked
    problem = problem_of(seen)
    own = OwnStatistics.of(problem)
    assert own is not None
    assert float(own.error(problem, image[None])) < 1e-6
    assert float(own.error(problem, (image + 0.05).clamp(0, 1)[None])) > 1e-3


def test_the_error_is_what_a_loop_over_hooks_gives(kinked: Any) -> None:
    seen, _ = kinked
    problem = problem_of(seen).to(torch.float64)
    own = OwnStatistics.of(problem)
    assert own is not None
    image = torch.rand(1, 1, 16, 16, dtype=torch.float64)
    network = create_model("resnet20", classes=10, channels=1, image_size=16, activation="relu")
    network.load_state_dict(seen.parameters | seen.buffers, strict=False)
    network = network.double().train()
    entering: dict[str, Any] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(
                lambda _, given, name=name: entering.__setitem__(name, given[0])
            )
    network(image)
    layers = []
    for name, features in entering.items():
        errors = []
        for channel in range(features.shape[1]):
            values = features[:, channel].detach().flatten()
            before, after = (
                [
                    held[f"{name}.{kind}"][channel].double()
                    for kind in ("running_mean", "running_var")
                ]
                for held in (seen.buffers, seen.returned_buffers)
            )
            mean, variance = (
                (float(a) - 0.9 * float(b)) / 0.1 for a, b in zip(after, before, strict=True)
            )
            off = (float(values.mean()) - mean) ** 2 / variance
            errors.append(off + (float(values.var()) / variance - 1) ** 2)
        layers.append(sum(errors) / len(errors))
    wanted = sum(layers) / len(layers)
    assert float(own.error(problem, image[None])) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.slow
def test_the_image_comes_back_without_its_gradient(kinked: Any) -> None:
    seen, image = kinked
    nonsense = {name: torch.randn_like(value) for name, value in seen.update.items()}
    # The label is read off the last layer; statistics do not need it.
    found = Statistics()(replace(seen, update=nonsense), budget=BUDGET)
    matched = attack("ig")(seen, budget=Budget(iterations=60))
    known, gradient = (scores(result.images, image)[0].psnr for result in (found, matched))
    assert known > gradient + 3
    trial = found.pick
    assert trial.statistics is not None and trial.statistics < 0.1
    assert trial.record().statistics == trial.statistics


@pytest.mark.usefixtures("no_spans")
def test_the_strongest_recipe_takes_the_statistics_through_kinks(
    kinked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = kinked
    monkeypatch.setattr(Statistics, "found_below", 1.0)
    found = Best()(seen, budget=Budget(iterations=60))
    assert found.method == "statistics"
    assert "batch statistics" in found.components
    without = Best()(replace(seen, returned_buffers={}), budget=Budget(iterations=5))
    assert without.method == "grnn"


@pytest.mark.usefixtures("no_spans")
def test_the_strongest_recipe_generates_where_the_statistics_are_not_met(kinked: Any) -> None:
    found = Best()(kinked[0], budget=Budget(iterations=8))
    assert found.pick.statistics is not None and found.pick.statistics > MATCHED
    assert found.method == "grnn"


def test_few_statistics_decide_nothing(digits: Any) -> None:
    # Three layers of 12 channels: 72 numbers for 256 pixels.
    seen = one_step(digits[0][:1], digits[1][:1], activation="relu")
    own = OwnStatistics.of(problem_of(seen))
    assert own is not None and not own.decisive(pixels=256)
    assert own.decisive(pixels=216) and not own.decisive(pixels=217)
    found = Best()(seen, budget=Budget(iterations=5))
    assert found.method == "grnn" and found.pick.statistics is None


@pytest.mark.thorough
@pytest.mark.usefixtures("no_spans")
def test_the_choice_among_attacks_counts_the_statistics(
    kinked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = kinked
    monkeypatch.setattr(Statistics, "found_below", 1.0)
    found = Auto()(seen, budget=Budget(iterations=80))
    assert found.method == "statistics"
    assert "batch statistics" in found.settings["criterion"]
    # By the cosine alone IG would have won: it is what IG minimises.
    last = max(t.pass_number for t in found.trials)
    assert last == 2
    by_attack = {t.attack: t for t in found.trials if t.pass_number == 1}
    assert by_attack["ig"].distance < by_attack["best"].distance
    errors = by_attack["ig"].statistics, by_attack["best"].statistics
    assert None not in errors
    assert errors[0] > errors[1]  # type: ignore[operator]


@pytest.mark.thorough
def test_a_batch_comes_back_in_part(digits: Any) -> None:
    images, labels = digits[0][:2], digits[1][:2]
    seen = one_step(images, labels, activation="relu", model="resnet20")
    found = Statistics()(seen, budget=BUDGET)
    assert found.images.shape == images.shape
    assert found.pick.loss < 0.3


@pytest.mark.parametrize(
    "change",
    [
        lambda seen: replace(seen, returned_buffers={}),
        lambda seen: replace(seen, declaration=seen.declaration.updated({"norm_mode": "eval"})),
    ],
)
def test_buffers_that_do_not_tell_one_batch_are_refused(kinked: Any, change: Any) -> None:
    with refused("attack-evidence", "statistics"):
        attack("statistics")(change(kinked[0]))


def test_a_model_without_normalisation_is_refused(observe: Any, tiny: Any) -> None:
    with refused("attack-evidence", "statistics"):
        attack("statistics")(observe(tiny[0][:1], tiny[1][:1]))


def test_a_channel_without_variance_tells_nothing_false(digits: Any) -> None:
    image = torch.zeros_like(digits[0][:1])
    seen = one_step(image, digits[1][:1], activation="relu")
    problem = problem_of(seen)
    own = OwnStatistics.of(problem)
    assert own is not None
    assert torch.isfinite(own.error(problem, torch.rand(1, 1, 1, 16, 16))).all()


def test_restarts_begin_elsewhere_and_repeat(kinked: Any) -> None:
    seen, _ = kinked
    budget = Budget(iterations=12, restarts=2)
    one, two = (Statistics()(seen, budget=budget, seed=3) for _ in range(2))
    assert torch.equal(one.trials[0].images, two.trials[0].images)
    assert not torch.equal(one.trials[0].images, one.trials[1].images)


def test_a_small_image_is_enlarged_as_torch_does() -> None:
    from bract.attacks.solve.pixels import resized

    small = torch.rand(2, 3, 1, 4, 4)
    for trial in range(2):
        wanted = F.interpolate(small[trial], (8, 6), mode="bilinear", align_corners=False)
        assert torch.equal(resized(small, (8, 6))[trial], wanted)
