"""Models of which a head is trained."""

from typing import Any

import pytest
import torch
from observing import observed
from refusals import refused
from torch import nn

from bract.attacks.problem.target_model import TargetModel
from bract.models import create_model
from bract.models.frozen import with_frozen_backbone


def lenet(activation: str = "sigmoid") -> nn.Module:
    torch.manual_seed(0)
    return create_model(
        "lenet", classes=10, channels=1, image_size=16, activation=activation
    ).eval()


def test_what_is_frozen_is_neither_a_parameter_nor_in_the_state() -> None:
    model = with_frozen_backbone(lenet(), ["classifier.5"])
    names = ["classifier.5.weight", "classifier.5.bias"]
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names


def test_a_frozen_model_computes_what_it_did() -> None:
    images = torch.rand(2, 1, 16, 16)
    model = lenet()
    before = model(images)
    assert torch.equal(with_frozen_backbone(model, ["classifier"])(images), before)


@pytest.mark.parametrize("trials", [1, 2])
def test_a_target_model_keeps_weights_that_no_capture_holds(trials: int) -> None:
    images = torch.rand(trials, 2, 1, 16, 16)
    # The biases too: a linear layer whose weight is trained has a frozen one here.
    model = with_frozen_backbone(lenet(), ["classifier.5"])
    seen = observed(images[0], torch.tensor([1, 2]), model=model, name="frozen")
    target = TargetModel(model, seen.declaration)
    parameters = {n: v[None].expand(trials, *v.shape) for n, v in seen.parameters.items()}
    found: Any = target(parameters, {}, images)
    assert torch.allclose(found, torch.stack([model(one) for one in images]), atol=1e-6)


def test_frozen_weights_follow_the_precision_of_the_parameters() -> None:
    images = torch.rand(1, 2, 1, 16, 16)
    model = with_frozen_backbone(lenet(), ["classifier.5"])
    seen = observed(images[0], torch.tensor([1, 2]), model=model, name="frozen")
    target = TargetModel(model, seen.declaration)
    for dtype in (torch.float64, torch.float32):
        parameters = {n: v[None].to(dtype) for n, v in seen.parameters.items()}
        assert target(parameters, {}, images.to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        (["head"], ("unknown-name", "head")),
        (["features", "classifier"], ("model-unsuited", "features", "classifier")),
    ],
)
def test_names_that_freeze_nothing_are_refused(
    trained: list[str], message: tuple[str, ...]
) -> None:
    with refused(*message):
        with_frozen_backbone(lenet(), trained)
