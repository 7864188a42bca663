"""An autoencoder as a model of its own reconstruction error, and what is read off its gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from foreign_models import BottleneckNet, bottleneck, named
from refusals import refused
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bract import Observation
from bract.attacks import ATTACKS
from bract.models import create_model
from bract.models.autoencoder import Autoencoder
from bract.schema import ClientDeclaration

SHAPE = (1, 8, 8)


class Rebuilding(nn.Module):
    """Convolutions to an image of the same size, with a parameter and a dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.inner = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), nn.Sigmoid(), nn.Conv2d(4, 1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        rebuilt: Tensor = F.dropout(self.scale * self.inner(x), 0.5, training=self.training)
        return rebuilt


@pytest.mark.parametrize("make", [bottleneck, Rebuilding])
def test_the_output_is_the_loss_that_the_client_trains_on(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, images = make().eval(), torch.rand(3, *SHAPE)
    wrapped = Autoencoder(model, SHAPE)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    if isinstance(model, BottleneckNet):
        rows = images.flatten(1)
        wanted = F.mse_loss(model.decoder(model.encoder(rows)), rows)
    else:
        wanted = F.mse_loss(model(images), images)
    torch.testing.assert_close(wrapped(images).mean(), wanted)
    assert wrapped(images).shape == (3, 1)


def test_parameters_that_replace_its_own_are_the_models_too() -> None:
    torch.manual_seed(0)
    model, images = Rebuilding().eval(), torch.rand(2, *SHAPE)
    wrapped = copy.deepcopy(Autoencoder(model, SHAPE))
    state = {name: torch.zeros_like(value) for name, value in wrapped.named_parameters()}
    found = functional_call(wrapped, state, (images,))
    torch.testing.assert_close(found, images.square().flatten(1).mean(1, keepdim=True))
    wrapped.train()
    assert not torch.equal(wrapped(images), wrapped(images)), "the model's own dropout is off"


def test_a_model_that_rebuilds_nothing_is_refused_with_what_it_returns() -> None:
    with refused("model-unsuited", "1×8×8", 2, 3):
        Autoencoder(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), SHAPE)


def test_the_image_is_read_off_the_first_layer_without_any_label() -> None:
    torch.manual_seed(0)
    model, image = bottleneck(), torch.rand(1, *SHAPE)
    assert isinstance(model, BottleneckNet)
    rows = image.flatten(1)
    loss = F.mse_loss(model.decoder(model.encoder(rows)), rows)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    observation = Observation(
        round=1,
        client="client-0",
        parameters={n: p.detach().clone() for n, p in model.named_parameters()},
        update={n: 0.1 * g for n, g in zip(names, gradients, strict=True)},
        declaration=ClientDeclaration(
            model=named(bottleneck), image_shape=SHAPE, classes=1, loss="reconstruction",
            lr=0.1, local_steps=1, batch_size=1, num_examples=1,
        ),
    )  # fmt: skip
    for attack in ("analytic", "auto"):
        found = ATTACKS[attack]()(observation)
        assert float((found.images - image).abs().max()) < 1e-4, attack


def test_the_registry_makes_what_the_loss_declares() -> None:
    made = create_model(
        named(bottleneck), classes=1, channels=1, image_size=8, loss="reconstruction"
    )
    assert isinstance(made, Autoencoder)
    assert isinstance(
        create_model(named(bottleneck), classes=1, channels=1, image_size=8), BottleneckNet
    )
