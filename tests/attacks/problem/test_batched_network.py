from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from bract.attacks.problem.batched_network import OWN_CONVOLUTION, BatchedNetwork
from bract.attacks.problem.client_model import loss_gradient
from bract.attacks.problem.target_model import TargetModel
from bract.models import create_model
from bract.schema import ClientDeclaration

TRIALS = 3


def state_of(model: Any, names: Any) -> Any:
    state = {}
    for name, value in model.state_dict().items():
        if name in names:
            noise = torch.rand(TRIALS, *value.shape, dtype=torch.float64)
            state[name] = noise + 0.1 if "var" in name else 0.3 * (noise - 0.5)
    return state


def target_model_on(name: Any, mode: Any, **changes: Any) -> Any:
    size = changes.get("image_size", 16)
    model = create_model(name, classes=4, channels=2, image_size=size, activation="sigmoid")
    target_model = TargetModel(model.double(), ClientDeclaration(model=name, norm_mode=mode))
    return target_model, size


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["lenet", "lenet-strided", "lenet-bn", "resnet20"])
@pytest.mark.parametrize("images_each", [2, OWN_CONVOLUTION])
def test_trials_give_the_gradients_that_vmap_gives(name: Any, mode: Any, images_each: int) -> None:
    target_model, size = target_model_on(name, mode)
    parameters = state_of(target_model.model, target_model.parameter_names)
    buffers = state_of(target_model.model, target_model.buffer_names)
    images = torch.rand(TRIALS, images_each, 2, size, size, dtype=torch.float64)
    labels = torch.rand(TRIALS, images_each, 4, dtype=torch.float64).softmax(dim=-1)
    assert target_model.network is not None
    found = loss_gradient(target_model, parameters, buffers, images, labels)
    target_model.network = None
    wanted = loss_gradient(target_model, parameters, buffers, images, labels)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, atol=1e-12 + 1e-9 * float(value.abs().max()))


def test_layers_with_the_same_parameters_give_the_gradients_that_vmap_gives() -> None:
    """An observation holds a tied parameter under its first name alone."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    model[3].weight, model[3].bias = model[1].weight, model[1].bias
    target_model = TargetModel(model.double(), ClientDeclaration(model="tied", norm_mode="eval"))
    parameters = state_of(target_model.model, target_model.parameter_names)
    images = torch.rand(TRIALS, 2, 2, 2, 2, dtype=torch.float64)
    labels = torch.rand(TRIALS, 2, 8, dtype=torch.float64).softmax(dim=-1)
    assert target_model.network is not None and list(parameters) == ["1.weight", "1.bias"]
    found = loss_gradient(target_model, parameters, {}, images, labels)
    target_model.network = None
    wanted = loss_gradient(target_model, parameters, {}, images, labels)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet18", "vgg16-bn"])
def test_torchvisions_models_are_known_too(name: Any) -> None:
    with torch.device("meta"):
        model = create_model(name, classes=4, channels=1, image_size=32, activation="relu")
    assert BatchedNetwork.of(model.eval()) is not None


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class Unfamiliar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x).cumsum(dim=1)


@pytest.mark.parametrize("model", [Branching(), Unfamiliar(), nn.Conv2d(2, 2, 1, groups=2)])
def test_what_it_does_not_know_is_left_to_vmap(model: Any) -> None:
    assert BatchedNetwork.of(model) is None


@pytest.mark.parametrize("images_each", [2, OWN_CONVOLUTION])
def test_convolutions_of_every_geometry_agree(images_each: int) -> None:
    for settings in (
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (1, 4), "stride": (2, 1), "padding": (0, 2), "bias": False},
        {"kernel_size": 2, "dilation": 3},
    ):
        model = nn.Sequential(nn.Conv2d(2, 3, **settings)).double()
        network = BatchedNetwork.of(model)
        assert network is not None
        state = {
            n: torch.randn(TRIALS, *p.shape, dtype=torch.float64)
            for n, p in model.named_parameters()
        }
        images = torch.randn(TRIALS, images_each, 2, 9, 8, dtype=torch.float64)
        wanted = vmap(lambda s, x, m=model: functional_call(m, s, (x,)))(state, images)
        assert torch.allclose(network(state, images), wanted, atol=1e-12)
