import copy
from typing import Any

import torch
from refusals import refused
from torch import nn
from torch.nn import functional as F

from bract.client.defenses import ProtectContext, build_defenses
from bract.defenses.entries import prepare_model
from bract.models import create_model
from bract.models.own_loss import auxiliary_loss
from bract.updates.update import parameters_of


def make() -> Any:
    torch.manual_seed(0)
    return create_model("lenet", classes=10, channels=1, image_size=32, activation="relu")


def test_precode_trains_with_noise_of_its_own_and_evaluates_without() -> None:
    chain = build_defenses([{"name": "precode", "latent": 8}])
    model: Any = chain.prepare_model(make())
    block = model.classifier[5].bottleneck
    assert block.encoder.weight.shape == (16, 84)
    with torch.no_grad():
        block.encoder.bias.fill_(3.0)  # a deviation of softplus(-2) = 0.13
    images = torch.rand(3, 1, 32, 32)
    assert not torch.equal(model(images), model(images))
    chain.attach(model, {}, ProtectContext(seed=1))
    first = model(images)
    chain.attach(model, {}, ProtectContext(seed=1))
    assert torch.equal(model(images), first)
    model.eval()
    assert torch.equal(model(images), model(images))


def test_an_attacker_can_baseline_the_noise() -> None:
    model: Any = prepare_model(make(), [{"name": "precode", "latent": 8}])
    block = model.classifier[5].bottleneck
    block.noise = torch.zeros(3, 8, requires_grad=True)
    images = torch.rand(3, 1, 32, 32)
    recovered = model(images)
    recovered.sum().backward()
    assert float(block.noise.grad.abs().sum()) > 0
    block.noise = None
    torch.testing.assert_close(model.eval()(images), recovered)


def test_the_divergence_is_the_closed_form_and_joins_the_loss() -> None:
    model: Any = prepare_model(
        nn.Sequential(nn.Linear(4, 2)), [{"name": "precode", "latent": 3, "weight": 0.5}]
    )
    features = torch.randn(5, 4)
    model(features)
    mean, width = model[0].bottleneck.encoder(features).chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, F.softplus(width - 5))
    standard = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    expected = torch.distributions.kl_divergence(normal, standard).sum(1).mean()
    torch.testing.assert_close(auxiliary_loss(model), 0.5 * expected)
    assert float(auxiliary_loss(make())) == 0.0
    assert float(auxiliary_loss(copy.deepcopy(model))) == 0.0


def test_models_that_do_not_fit_are_refused() -> None:
    chain = build_defenses([{"name": "precode"}])
    with refused("defense-failed", "precode"):
        chain.protect(parameters_of(make()), {}, ProtectContext(model=make()))
    with refused("model-unsuited", "linear"):
        chain.prepare_model(nn.Sequential(nn.Conv2d(1, 1, 3)))
    with refused("defense-unsuited", "precode"):
        chain.prepare_model(nn.Sequential(nn.Linear(4, 4)))(torch.zeros(2, 3, 4))
