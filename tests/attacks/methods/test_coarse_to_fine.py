from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bract import Observation
from bract.attacks import Budget, Problem, Reconstruction, attack, reconstruct
from bract.attacks.methods import coarse_to_fine
from bract.attacks.problem import training_path
from bract.attacks.problem.case import open_case
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.training_path import PLACE
from bract.attacks.solve.pixels import resized
from bract.audit.questions.reconstruction.scores.image import match, psnr
from bract.models import create_model
from bract.models.initialise import initialise


def test_sizes_grow_and_share_the_whole_run() -> None:
    found = coarse_to_fine.CoarseToFine()._stages((32, 64))
    assert [sides for sides, _ in found] == [(8, 16), (16, 32), (32, 64)]
    assert sum(share for _, share in found) == 1.0
    halved = coarse_to_fine.CoarseToFine()._stages((16, 40))
    assert [sides for sides, _ in halved] == [(8, 20), (16, 40)]
    assert coarse_to_fine.CoarseToFine()._stages((7, 56)) == [((7, 56), 1.0)]


@pytest.mark.thorough
def test_images_of_several_epochs_come_back_whatever_their_order(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:6], digits[1][:6]
    network = create_model(
        "lenet-strided", classes=10, channels=1, image_size=16, activation="relu"
    )
    seen = observe(
        images,
        labels,
        model=initialise(network, "default", 0),
        steps=18,
        batch_size=2,
        lr=0.01,
        activation="relu",
    )
    seen = replace(seen, declaration=seen.declaration.updated({"model": "lenet-strided"}))
    result = attack("coarse-to-fine")(seen, budget=Budget(iterations=300), seed=1)
    pairs = match(result.images, images)
    found = float(psnr(result.images[pairs], images).mean())
    grey = float(psnr(torch.full_like(images, 0.3), images).mean())
    assert found > grey + 4.0
    assert {"pixels", "coarse to fine", "total variation"} <= set(result.components)


def test_enlarging_keeps_a_plane() -> None:
    plane = torch.full((1, 2, 1, 4, 4), 0.7)
    assert torch.equal(resized(plane, (4, 4)), plane)
    assert torch.allclose(resized(plane, (8, 6)), torch.full((1, 2, 1, 8, 6), 0.7))


def _long_training(
    observe: Any, images: Tensor, labels: Tensor, *, classes: int = 40, **changes: Any
) -> Observation:
    network = create_model(
        "lenet-strided", classes=classes, channels=1, image_size=16, activation="relu"
    )
    settings = {"steps": 20, "batch_size": 10, "lr": 0.01, "activation": "relu"} | changes
    model = initialise(network, "default", 0)
    seen: Observation = observe(images, labels, model=model, classes=classes, **settings)
    return replace(seen, declaration=seen.declaration.updated({"model": "lenet-strided"}))


def _problem(seen: Observation, images: int) -> Problem:
    case = open_case(seen, tier="oblivious", max_images=images)
    return Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))


HEAD = ("classifier.1.weight", "classifier.1.bias")


@pytest.mark.parametrize(
    ("images", "classes", "changes", "expected"),
    [
        pytest.param(40, 20, {}, HEAD, id="two images a class"),
        pytest.param(40, 19, {}, (), id="classes mix"),
        pytest.param(20, 20, {}, (), id="fewer pixels than other weights"),
        pytest.param(40, 20, {"steps": 1, "batch_size": 40}, (), id="one step"),
        pytest.param(40, 20, {"optimizer": "adam", "lr": 1e-3}, (), id="adam"),
    ],
)
def test_where_the_last_layer_is_matched_alone(
    observe: Any,
    digits: Any,
    images: int,
    classes: int,
    changes: dict[str, Any],
    expected: tuple[str, ...],
) -> None:
    labels = torch.arange(images) % classes
    seen = _long_training(observe, digits[0][:images], labels, classes=classes, **changes)
    assert coarse_to_fine._telling_head(_problem(seen, images).cases[0]) == expected


def test_a_last_layer_whose_bias_is_frozen_is_matched_by_its_weight(
    observe: Any, digits: Any
) -> None:
    seen = _long_training(observe, digits[0][:40], torch.arange(40))
    case = open_case(seen, tier="oblivious", max_images=40)
    target = {name: value for name, value in case.evidence.target.items() if name != HEAD[1]}
    frozen = replace(case, evidence=replace(case.evidence, target=target))
    assert coarse_to_fine._telling_head(frozen) == HEAD[:1]


def test_one_layer_is_simulated_as_it_is_among_all(observe: Any, digits: Any) -> None:
    problem = _problem(_long_training(observe, digits[0][:40], torch.arange(40)), 40)
    alone = coarse_to_fine._matching(problem, HEAD)
    images, labels = digits[0][None, :40], torch.eye(40)[None]
    whole, part = (p.simulate(images, labels, {}) for p in (problem, alone))
    assert set(part) == set(HEAD) < set(whole)
    assert all(torch.allclose(part[name], whole[name], atol=1e-7) for name in HEAD)


@pytest.mark.thorough
def test_images_of_classes_of_their_own_are_read_off_the_last_layer(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits[0][:40]
    seen = _long_training(observe, images, torch.arange(40))
    budget = Budget(iterations=200, max_images=40)

    def found() -> tuple[float, tuple[str, ...], Tensor | None]:
        made = attack("coarse-to-fine")(seen, budget=budget, seed=1)
        pairs = match(made.images, images)
        return (
            float(psnr(made.images[pairs], images).mean()),
            made.components,
            made.trials[made.chosen].unknowns.get(PLACE),
        )

    read, components, place = found()
    assert "last layer" in components and place is not None
    monkeypatch.setattr(coarse_to_fine, "_telling_head", lambda _: ())
    whole, components, place = found()
    assert read > whole + 1.0
    assert "last layer" not in components and place is None


@pytest.mark.thorough
def test_images_of_a_smaller_last_batch_are_counted_as_often_as_they_were(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits[0][:41]
    seen = _long_training(observe, images, torch.arange(41), classes=41, steps=20)
    budget = Budget(iterations=200, max_images=41)

    def found() -> tuple[float, int]:
        made = attack("coarse-to-fine")(seen, budget=budget, seed=1)
        pairs = match(made.images, images)
        quality = float(psnr(made.images[pairs], images).mean())
        return quality, len(set(made.labels.tolist()))

    score, labels = found()
    monkeypatch.setattr(training_path, "_uneven", lambda *_: False)
    equal, fewer = found()
    assert labels == 41 > fewer
    assert score > equal + 1.0


def test_the_place_on_the_way_is_found_where_steps_are_large(observe: Any, digits: Any) -> None:
    seen = _long_training(
        observe, digits[0][:40], torch.arange(40), steps=160, batch_size=5, lr=0.05
    )
    problem = coarse_to_fine._matching(_problem(seen, 40), HEAD)
    images, labels = digits[0][None, :40], torch.eye(40)[None]

    def apart(place: float) -> float:
        logit = torch.logit(torch.tensor([(2.0 * place - 0.5) / 0.7]))
        simulated = problem.simulate(images, labels, {PLACE: logit})
        return float(problem.distance(RelativeError(), simulated))

    assert apart(0.35) < 0.5 * apart(0.5)
    budget = Budget(iterations=200, max_images=40)
    made = attack("coarse-to-fine")(seen, budget=budget, seed=1)
    logit = made.trials[made.chosen].unknowns[PLACE]
    assert 0.5 * (0.5 + 0.7 * float(logit.sigmoid())) < 0.45


@pytest.mark.parametrize(
    ("images", "changes", "suits"),
    [(40, {}, True), (20, {}, False), (40, {"optimizer": "adam", "lr": 1e-3}, False)],
)
def test_auto_lets_it_compete_where_the_last_layer_tells_all_images(
    observe: Any, digits: Any, images: int, changes: dict[str, Any], suits: bool
) -> None:
    seen = _long_training(observe, digits[0][:images], torch.arange(images), **changes)
    case = open_case(seen, tier="oblivious", max_images=8)
    assert coarse_to_fine.CoarseToFine().suits(case) is suits
    assert coarse_to_fine.CoarseToFine().prepare(case).images == (images if suits else 8)


@pytest.mark.thorough
def test_auto_finds_all_images_of_long_training_whatever_the_limit(
    observe: Any, digits: Any
) -> None:
    seen = _long_training(observe, digits[0][:40], torch.arange(40))
    (found,) = reconstruct([seen], "auto", budget=Budget(iterations=100), device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.pick.attack == "coarse-to-fine" and len(found.images) == 40
    assert {len(trial.images) for trial in found.trials if trial.attack == "ig"} == {8}
