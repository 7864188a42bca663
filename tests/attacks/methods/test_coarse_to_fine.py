from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bract.attacks import Budget, attack
from bract.attacks.methods import coarse_to_fine
from bract.attacks.methods.coarse_to_fine import CoarseToFine
from bract.attacks.problem.case import open_case
from bract.attacks.problem.problem import Problem
from bract.attacks.solve.pixels import resized
from bract.audit.questions.reconstruction.scores.image import match, psnr
from bract.models import create_model
from bract.models.initialise import initialise
from bract.protocol.observation import Observation


def test_sizes_grow_and_share_the_whole_run() -> None:
    found = CoarseToFine()._stages(32)
    assert [side for side, _ in found] == [8, 16, 32]
    assert sum(share for _, share in found) == 1.0
    assert [side for side, _ in CoarseToFine()._stages(16)] == [8, 16]
    assert CoarseToFine()._stages(7) == [(7, 1.0)]


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
    assert torch.equal(resized(plane, 4), plane)
    assert torch.allclose(resized(plane, 8), torch.full((1, 2, 1, 8, 8), 0.7))


def _long_training(
    observe: Any, images: Tensor, labels: Tensor, *, classes: int = 10, **changes: Any
) -> Observation:
    network = create_model(
        "lenet-strided", classes=classes, channels=1, image_size=16, activation="relu"
    )
    settings = {"steps": 20, "batch_size": 10, "lr": 0.01, "activation": "relu"} | changes
    model = initialise(network, "default", 0)
    seen = observe(images, labels, model=model, classes=classes, **settings)
    return replace(seen, declaration=seen.declaration.updated({"model": "lenet-strided"}))


def _problem(seen: Observation, images: int) -> Problem:
    case = open_case(seen, tier="oblivious", max_images=images)
    return Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))


def test_the_last_layer_is_matched_alone_where_there_are_more_pixels_than_other_weights(
    observe: Any, digits: Any
) -> None:
    many = _long_training(observe, digits[0][:40], digits[1][:40])
    few = _long_training(observe, digits[0][:20], digits[1][:20])
    head = ("classifier.1.weight", "classifier.1.bias")
    assert coarse_to_fine._telling_head(_problem(many, 40)) == head
    assert coarse_to_fine._telling_head(_problem(few, 20)) == ()
    one_step = _long_training(observe, digits[0][:40], digits[1][:40], steps=1, batch_size=40)
    assert coarse_to_fine._telling_head(_problem(one_step, 40)) == ()


def test_one_layer_is_simulated_as_it_is_among_all(observe: Any, digits: Any) -> None:
    problem = _problem(_long_training(observe, digits[0][:40], digits[1][:40]), 40)
    names = ("classifier.1.weight", "classifier.1.bias")
    alone = coarse_to_fine._matching(problem, names)
    images, labels = digits[0][None, :40], torch.eye(10)[digits[1][:40]][None]
    whole, part = (p.simulate(images, labels, {}) for p in (problem, alone))
    assert set(part) == set(names) < set(whole)
    assert all(torch.allclose(part[name], whole[name], atol=1e-7) for name in names)


def test_images_of_classes_of_their_own_are_read_off_the_last_layer(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits[0][:40]
    seen = _long_training(observe, images, torch.arange(40), classes=62)
    budget = Budget(iterations=200, max_images=40)

    def score() -> float:
        found = attack("coarse-to-fine")(seen, budget=budget, seed=1)
        pairs = match(found.images, images)
        return float(psnr(found.images[pairs], images).mean())

    read = score()
    monkeypatch.setattr(coarse_to_fine, "_telling_head", lambda _: ())
    assert read > score() + 2.0
