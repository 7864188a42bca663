from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import check_refusal, refused
from torch import nn

from bract.attacks import Refusal, reconstruct
from bract.attacks.methods.analytic import Analytic
from bract.models import MODELS
from bract.scores import match, psnr


class Perceptron(nn.Module):
    """Flatten, hidden layer, output layer."""

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        act = nn.ReLU() if activation == "relu" else nn.Sigmoid()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * image_size**2, 512), act, nn.Linear(512, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(images)
        return result


@pytest.fixture
def seen_by_mlp(observe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(MODELS._entries, "test-mlp", Perceptron)

    def make(images: Any, labels: Any, activation: Any = "sigmoid", **settings: Any) -> Any:
        torch.manual_seed(0)
        size = images.shape[-1]
        network = Perceptron(classes=10, channels=1, image_size=size, activation=activation)
        seen = observe(images, labels, model=network, **settings)
        declared = seen.declaration.updated({"model": "test-mlp", "activation": activation})
        return replace(seen, declaration=declared)

    return make


def test_one_image_is_read_off_exactly(seen_by_mlp: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    found = Analytic()(seen_by_mlp(images, labels))
    assert float(psnr(found.images, images)[0]) > 80
    assert found.labels.tolist() == labels.tolist()
    assert found.gradient_residual is not None and found.gradient_residual < 1e-3


def test_one_image_is_read_off_exactly_after_several_local_steps(
    seen_by_mlp: Any, digits: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    found = Analytic()(seen_by_mlp(images, labels, steps=5, lr=0.2))
    assert float(psnr(found.images, images)[0]) > 60


def test_a_relu_batch_gives_away_the_examples_that_excite_neurons_alone(
    seen_by_mlp: Any, digits: Any
) -> None:
    images, labels = digits[0][:2], digits[1][:2]
    found = Analytic()(seen_by_mlp(images, labels, activation="relu"))
    paired = found.images[match(found.images, images)]
    assert psnr(paired, images).min() > 60


def test_a_layer_that_mixes_all_examples_is_refused_and_stops_nobody_else(
    seen_by_mlp: Any, digits: Any
) -> None:
    mixed = replace(seen_by_mlp(digits[0][:2], digits[1][:2]), client="mixed")
    clear = seen_by_mlp(digits[0][2:4], digits[1][2:4], activation="relu")
    clear = replace(clear, client="clear")
    results = reconstruct([mixed, clear], "analytic", device="cpu")
    assert isinstance(results[0], Refusal)
    check_refusal(results[0], "attack-unsolved")
    assert not isinstance(results[1], Refusal)


def test_a_convolution_before_the_layer_is_refused(observe: Any, digits: Any) -> None:
    with refused("attack-unsuited", "connected"):
        Analytic()(observe(digits[0][:1], digits[1][:1]))
