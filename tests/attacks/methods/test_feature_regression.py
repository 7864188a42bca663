"""Estimating images from the features of a trained network's last layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import one_step, scores
from refusals import refused
from torch import Tensor

from bract.attacks import (
    Budget,
    Case,
    Entered,
    Problem,
    ReadingBudget,
    Reconstruction,
    attack,
    reconstruct,
)
from bract.attacks.methods import feature_regression
from bract.attacks.problem.case import open_case
from bract.process import clock

LABELS = torch.tensor([3, 1, 7])


@pytest.fixture(scope="module")
def batch() -> Tensor:
    """Three grey images of 16 pixels."""
    return feature_regression.drawn_images(3, (1, 16, 16), torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def seen(batch: Tensor) -> Any:
    return one_step(batch, LABELS, activation="relu", model="resnet20")


def case_of(seen: Any) -> Case:
    return open_case(seen, tier="oblivious", max_images=8, unroll=16)


def test_a_linear_map_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(400, 6, generator=generator)
    pixels = features @ torch.rand(6, 4, generator=generator)
    fit = feature_regression.Regression.of(features, pixels)
    assert fit.left < 1e-5
    assert torch.allclose(fit(features[:3]).float(), pixels[:3], atol=1e-2)


def test_pixels_that_features_do_not_tell_are_left_open() -> None:
    generator = torch.Generator().manual_seed(0)
    features, pixels = (torch.rand(400, 6, generator=generator) for _ in range(2))
    assert feature_regression.Regression.of(features, pixels).left > 0.9


def test_drawn_images_are_of_all_colours_and_smooth() -> None:
    images = feature_regression.drawn_images(200, (3, 16, 16), torch.Generator().manual_seed(0))
    assert images.shape == (200, 3, 16, 16) and images.min() >= 0.0 and images.max() <= 1.0
    colours = images.mean(dim=(2, 3))
    assert colours.min() < 0.1 and colours.max() > 0.9
    steps = (images[..., 1:] - images[..., :-1]).square().mean()
    assert steps < 0.5 * images.var(dim=(2, 3)).mean()


def test_each_image_alone_has_the_features_that_it_has_in_the_client_s_batch(
    seen: Any, batch: Tensor
) -> None:
    case = case_of(seen)
    read = attack("feature-regression")
    assert isinstance(read, feature_regression.FeatureRegression)
    entered = read.read(case, ReadingBudget())
    assert isinstance(entered, Entered) and entered.values is not None
    assert entered.labels is not None
    alone = feature_regression._features(case, batch, torch.device("cpu"))
    order = [LABELS.tolist().index(int(label)) for label in entered.labels]
    assert torch.allclose(alone[order].double(), entered.values, atol=1e-4)


def test_images_come_nearer_than_grey_ones(seen: Any, batch: Tensor) -> None:
    found = attack("feature-regression", samples=400)(seen)
    assert found.final_loss < feature_regression.NEARER
    assert sorted(found.labels.tolist()) == sorted(LABELS.tolist())
    made = [row.psnr for row in scores(found.images, batch)]
    grey = [row.psnr for row in scores(torch.full_like(batch, 0.5), batch)]
    assert sum(made) > sum(grey) + 3 * 3.0


def test_time_ends_the_drawing(seen: Any, batch: Tensor, ticking: None) -> None:
    case = case_of(seen)
    images = batch[:1].expand(200, -1, -1, -1)
    found = feature_regression._features(case, images, torch.device("cpu"), clock.now())
    assert 0 < len(found) < 200


@pytest.mark.thorough
def test_best_takes_it_for_more_places_than_units() -> None:
    images = feature_regression.drawn_images(5, (1, 16, 16), torch.Generator().manual_seed(1))
    seen = one_step(images, torch.tensor([3, 1, 7, 0, 5]), activation="relu", model="resnet20")
    (found,) = reconstruct([seen], "best", budget=Budget(iterations=2))
    assert isinstance(found, Reconstruction)
    assert found.trials[found.chosen].method == "feature-regression"


def test_one_image_and_shallow_or_smooth_models_are_left_to_other_attacks(batch: Tensor) -> None:
    method = attack("feature-regression")
    assert isinstance(method, feature_regression.FeatureRegression)

    def taken(count: int, **model: Any) -> bool:
        case = case_of(one_step(batch[:count], LABELS[:count], **model))
        problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
        return method.for_best(problem) is not None

    assert taken(2, activation="relu", model="resnet20")
    assert not taken(1, activation="relu", model="resnet20")
    assert not taken(2, activation="sigmoid", model="resnet20")
    assert not taken(2, activation="relu", model="lenet-strided-bn")


@pytest.mark.parametrize("lacks", ["buffers", "one step"])
def test_a_batch_whose_statistics_are_not_known_is_refused(
    seen: Any, batch: Tensor, lacks: str
) -> None:
    if lacks == "buffers":
        given = replace(seen, returned_buffers={})
    else:
        given = one_step(batch, LABELS, steps=2, activation="relu", model="resnet20")
    with refused("attack-evidence", "one batch"):
        attack("feature-regression")(given)


def test_strokes_which_drawn_images_do_not_resemble_are_no_near_estimate() -> None:
    strokes = torch.zeros(3, 1, 16, 16)
    strokes[0, 0, 2:14, 7:9] = 1.0
    strokes[1, 0, 7:9, 2:14] = 1.0
    strokes[2, 0, 3:5, 3:13] = strokes[2, 0, 3:13, 11:13] = 1.0
    found = attack("feature-regression", samples=400)(
        one_step(strokes, LABELS, activation="relu", model="resnet20")
    )
    assert found.final_loss > feature_regression.NEARER


def test_of_fewer_images_than_columns_the_slope_is_that_of_all_equations() -> None:
    generator = torch.Generator().manual_seed(0)
    features, pixels = (
        torch.rand(50, 60, generator=generator),
        torch.rand(50, 2, generator=generator),
    )
    few = feature_regression.Regression.of(features, pixels)
    rows = (feature_regression._bent(features.double() / few.size) - few.centre) / few.spread
    fitted, wanted = rows[:40], (pixels.double() - few.mean)[:40]
    slopes = [
        torch.linalg.solve(fitted.T @ fitted + r * 40 * torch.eye(180).double(), fitted.T @ wanted)
        for r in feature_regression._RIDGES
    ]
    assert min(float((few.slope - slope).abs().max()) for slope in slopes) < 1e-8


def test_a_reading_ends_with_its_time(seen: Any) -> None:
    read = feature_regression.FeatureRegression().entered
    with refused("attack-unsolved", "0 starts"):
        read(case_of(seen), ReadingBudget(seconds=0.0))
