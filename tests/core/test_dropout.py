"""Dropout in models whose tensors keep their names, and where its masks go."""

from typing import Any

import pytest
import torch
from model_zoo import image_models
from torch import nn
from torch.nn import functional as F

from bract.errors import BractError
from bract.models import create_model
from bract.models.dropout import (
    SeededDropout,
    dropout_rate,
    masked_layers,
    seed_dropout,
    with_dropout,
)
from bract_papers.models.bottleneck import insert_bottleneck


def made(name: str = "lenet-strided", size: int = 16) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return create_model(name, classes=10, channels=1, image_size=size)


def test_a_mask_is_drawn_from_the_generator_and_scales_what_is_kept() -> None:
    layer = SeededDropout(0.25)
    layer.source = torch.Generator().manual_seed(3)
    features = torch.full((40, 500), 3.0)
    found = layer(features)
    assert set(found.unique().tolist()) == {0.0, 4.0}  # 3 / (1 - 0.25)
    assert float((found == 0).double().mean()) == pytest.approx(0.25, abs=0.02)
    layer.source.manual_seed(3)
    before = torch.random.get_rng_state()
    assert torch.equal(layer(features), found)
    assert torch.equal(torch.random.get_rng_state(), before)  # nothing secret is disturbed
    assert torch.equal(layer.eval()(features), features)


@pytest.mark.parametrize("name", image_models())
def test_every_model_of_the_zoo_takes_dropout_and_keeps_its_tensors(name: str) -> None:
    with torch.device("meta"):
        plain, dropped = (create_model(name, classes=10, channels=3, image_size=64) for _ in "ab")
        dropped = with_dropout(dropped, 0.3, classes=10)
    assert dropout_rate(dropped) == 0.3
    assert list(dropped.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in dropped.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize("name", ["lenet", "lenet-strided", "mlp"])
def test_the_inputs_of_the_output_layer_are_dropped_while_training_alone(name: str) -> None:
    images, labels = torch.rand(1, 1, 16, 16), torch.tensor([3])
    plain = made(name)
    expected = plain(images)
    model = with_dropout(made(name), 0.5, classes=10)
    seed_dropout(model, torch.Generator().manual_seed(1))
    assert torch.equal(model.eval()(images), expected)
    logits = model.train()(images)
    assert not torch.equal(logits, expected)
    weight = [p for p in model.parameters() if p.dim() == 2][-1]
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels), [weight])
    share = float((gradient == 0).all(0).double().mean())
    assert 0.3 < share < 0.7


def test_a_models_own_rates_stay_unless_another_is_given() -> None:
    with torch.device("meta"):
        model = create_model("vgg16", classes=10, channels=3, image_size=32)
        assert dropout_rate(with_dropout(model, None, classes=10)) == 0.5
        assert dropout_rate(with_dropout(model, 0.2, classes=10)) == 0.2
        assert dropout_rate(with_dropout(model, 0.0, classes=10)) == 0.0
    assert dropout_rate(with_dropout(made(), None, classes=10)) == 0.0


def test_a_bottleneck_before_the_output_layer_stays_before_it() -> None:
    model = with_dropout(insert_bottleneck(made(), latent=8), 0.5, classes=10)
    assert model(torch.rand(2, 1, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 10, 3)), "has no linear output layer"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(9, 7), nn.Unflatten(1, (7, 1, 1))),
            r"\(1\) has 7 outputs, expected",
        ),
        (nn.Linear(9, 10), "the model itself"),
    ],
)
def test_a_model_without_a_head_is_refused_with_the_key_to_change(model: Any, message: str) -> None:
    with pytest.raises(BractError, match=r"training\.dropout is 0\.4: .*" + message):
        with_dropout(model, 0.4, classes=10)


class Own(nn.Module):
    """Dropout as the examples of PyTorch write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(72, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout1(F.relu(self.conv(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        logits: torch.Tensor = self.fc2(self.dropout2(x))
        return logits


def test_the_linear_layers_behind_dropout_are_found_through_what_a_mask_passes() -> None:
    assert masked_layers(Own()) == {"fc1": 0.25, "fc2": 0.5}
    with torch.device("meta"):
        vgg = create_model("vgg16", classes=10, channels=3, image_size=32)
    assert masked_layers(vgg) == {"classifier.3": 0.5, "classifier.6": 0.5}
    assert masked_layers(made()) == {}


def test_dropout_that_reaches_no_linear_layer_is_told() -> None:
    assert masked_layers(nn.Sequential(nn.Dropout(0.5), nn.Conv2d(1, 1, 3))) is None
    assert masked_layers(nn.Sequential(nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(2, 2))) is None


def test_layers_of_different_rates_declare_none() -> None:
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 10))
    assert masked_layers(model) == {"1": 0.2, "3": 0.5}
    assert dropout_rate(with_dropout(model, None, classes=10)) is None
    assert dropout_rate(with_dropout(model, 0.3, classes=10)) == 0.3
