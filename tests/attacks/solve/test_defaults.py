import functools
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_zoo import image_models
from refusals import refused
from torch import nn

from bract.attacks import ATTACKS, GRNN, IG, Budget, attack
from bract.attacks.methods.grnn.grnn_polish import GRNNPolish
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.problem.case import open_case
from bract.attacks.problem.model_traits import ModelTraits, traits_of
from bract.attacks.solve.defaults import family_of
from bract.attacks.solve.regularizers import TotalVariation
from bract.defenses.entries import prepare_model
from bract.installed import own_word
from bract.models import create_model

SHALLOW = ModelTraits(weight_layers=4, smooth=True)
DEEP = ModelTraits(weight_layers=20, smooth=False)
SHAPE = (3, 32, 32)
ZOO = image_models()
"""bract's own models, whatever other packages and tests register."""
SHALLOW_ONES = ("lenet", "linear", "logistic", "mlp")


def zoo_model(name: str, activation: str = "sigmoid") -> nn.Module:
    with torch.device("meta"):
        return create_model(name, classes=10, channels=3, image_size=32, activation=activation)


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every model of the zoo behind a name that says nothing: ``strangers:model_<number>``."""
    module = types.ModuleType("strangers")
    names = {}
    for number, name in enumerate(ZOO):
        build = functools.partial(
            create_model, name, classes=10, channels=1, image_size=16, activation="sigmoid"
        )
        setattr(module, f"model_{number}", build)
        names[name] = own_word(f"strangers:model_{number}")
    monkeypatch.setitem(sys.modules, "strangers", module)
    return names


@pytest.mark.thorough
def test_lenets_perceptrons_and_linear_models_are_shallow_and_the_other_models_deep() -> None:
    assert {"lenet", "resnet20"} < set(ZOO)
    for name in ZOO:
        traits = traits_of(zoo_model(name), SHAPE)
        wanted = "shallow" if name.startswith(SHALLOW_ONES) else "deep"
        assert family_of(traits) == wanted, name


@pytest.mark.parametrize("defense", [{"name": "fedkl"}, {"name": "precode", "latent": 16}])
@pytest.mark.parametrize("name", ["lenet-bn", "lenet-strided-bn", "resnet20"])
def test_a_defense_that_changes_the_model_leaves_its_family(name: Any, defense: Any) -> None:
    with torch.device("meta"):
        defended = prepare_model(zoo_model(name), [defense])
    plain, changed = traits_of(zoo_model(name), SHAPE), traits_of(defended, SHAPE)
    assert family_of(changed) == family_of(plain)


class Functional(nn.Module):
    """A LeNet without a module for its pooling and activations."""

    def __init__(self, pool: Any = None, activation: Any = torch.sigmoid) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5)
        self.fc = nn.Linear(4 * 28 * 28, 10)
        self.pool, self.activation = pool, activation

    def forward(self, x: Any) -> Any:
        x = self.activation(self.conv(x))
        if self.pool is not None:
            x = nn.functional.interpolate(self.pool(x, 2), 28)
        return self.fc(x.flatten(1))


@pytest.mark.parametrize(
    ("model", "smooth"),
    [
        (Functional(), True),
        (Functional(activation=torch.tanh), True),
        (Functional(activation=nn.functional.gelu), True),
        (Functional(activation=torch.relu), False),
        (Functional(activation=nn.functional.leaky_relu), False),
        (Functional(activation=lambda x: x.clamp_min(0)), False),
        (Functional(pool=nn.functional.max_pool2d), False),
        (Functional(pool=nn.functional.avg_pool2d), True),
    ],
)
def test_kinks_are_found_in_functions_as_in_modules(model: Any, smooth: Any) -> None:
    assert traits_of(model, SHAPE).smooth is smooth


@pytest.mark.parametrize(
    ("model", "attends"),
    [("vit(patch=8,width=48,depth=1,heads=2)", True), ("lenet-strided", False)],
)
def test_a_softmax_over_tokens_is_seen_in_transformers_alone(model: str, attends: bool) -> None:
    made = create_model(model, classes=10, channels=3, image_size=32)
    assert traits_of(made, SHAPE).attends is attends


def test_looking_at_a_model_leaves_its_buffers() -> None:
    model = create_model("resnet20", classes=10, channels=3, image_size=32).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    traits_of(model, SHAPE)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_an_input_that_the_model_does_not_take_is_named() -> None:
    with refused("declaration-wrong", 1, 8):
        traits_of(Functional(), (1, 8, 8))


def test_a_model_under_a_strangers_name_is_attacked_with_the_same_settings(
    observe: Any, digits: Any, strangers: Any
) -> None:
    for name in ("lenet", "lenet-bn", "lenet-strided", "lenet-strided-bn", "resnet20"):
        seen = observe(digits[0][:1], digits[1][:1], model=name)
        other = replace(seen, declaration=seen.declaration.updated({"model": strangers[name]}))
        cases = [open_case(o, tier="oblivious", max_images=1, unroll=16) for o in (seen, other)]
        assert cases[0].target_model.traits == cases[1].target_model.traits
        for kind in ATTACKS:
            known, strange = (attack(kind).for_model(c.target_model.traits) for c in cases)
            assert known == strange, (name, kind)


@pytest.mark.thorough
@pytest.mark.parametrize("chosen", [GRNN(width=4, latent=4), IG(), Best()], ids=lambda a: a.name)
@pytest.mark.parametrize("model", ["lenet", "lenet-strided", "lenet-strided-bn"])
def test_a_model_under_a_strangers_name_gives_the_same_image(
    observe: Any, digits: Any, strangers: Any, chosen: Any, model: Any
) -> None:
    seen = observe(digits[0][:1], digits[1][:1], model=model)
    other = replace(seen, declaration=seen.declaration.updated({"model": strangers[model]}))
    found = [chosen(o, budget=Budget(iterations=3), seed=1) for o in (seen, other)]
    assert torch.equal(found[0].images, found[1].images)
    assert found[0].settings == found[1].settings


@pytest.mark.parametrize(
    ("attack", "shallow", "deep"),
    [(GRNN(), 2e-3, 2e-6), (GRNNPolish(), 2e-3, 2e-6), (IG(), 1e-6, 1e-4)],
)
def test_what_is_left_out_takes_the_value_of_the_model(
    attack: Any, shallow: Any, deep: Any
) -> None:
    assert attack.for_model(SHALLOW).tv == shallow
    assert attack.for_model(DEEP).tv == deep


def test_a_rectified_network_takes_more_of_igs_prior_and_max_pooling_alone_does_not() -> None:
    def tv(model: nn.Module) -> float | None:
        return IG().for_model(traits_of(model, SHAPE)).tv

    assert tv(zoo_model("lenet-strided", "relu")) == 0.1
    assert tv(Functional(activation=nn.functional.leaky_relu)) == 0.1
    assert tv(zoo_model("lenet-strided")) == tv(zoo_model("lenet")) == 1e-6
    assert tv(zoo_model("resnet20", "relu")) == 1e-4


@pytest.mark.parametrize("tv", [0.0, 0.5])
def test_what_the_user_gave_stays(tv: Any) -> None:
    assert IG(tv=tv).for_model(DEEP) == IG(tv=tv)


@pytest.mark.parametrize(("attack", "tv"), [(GRNN(width=4), 2e-3), (IG(), 1e-6), (IG(tv=0.5), 0.5)])
def test_the_weight_that_an_attack_uses_is_the_one_in_its_settings(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, attack: Any, tv: Any
) -> None:
    used = []
    untouched = TotalVariation.__call__

    def spy(self: Any, problem: Any, images: Any) -> Any:
        used.append(self.weight)
        return untouched(self, problem, images)

    monkeypatch.setattr(TotalVariation, "__call__", spy)
    found = attack(observe(tiny[0][:1], tiny[1][:1]), budget=Budget(iterations=1))
    assert found.settings["tv"] == tv
    assert set(used) == {tv}


def test_a_residual_network_takes_the_papers_weights(observe: Any) -> None:
    seen = observe(torch.rand(1, 3, 8, 8), torch.tensor([1]), model="resnet20")
    found = GRNN(width=4, latent=4)(seen, budget=Budget(iterations=1))
    assert found.settings["tv"] == 2e-6
