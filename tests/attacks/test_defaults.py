from pathlib import Path

import pytest
import torch

from bract.attacks import GRNN, IG, Budget, GRNNPolish
from bract.attacks.defaults import MODEL_DEFAULTS, family_of, for_model
from bract.attacks.priors import TotalVariation

DOCS = Path(__file__).parents[2] / "docs" / "attacks.md"


def test_families_go_by_the_name_of_the_model():
    assert family_of("lenet-strided-bn") == "LeNet"
    for name in ("resnet20", "vgg16", "somebody.models:net", None):
        assert family_of(name) == "deep"


@pytest.mark.parametrize(
    ("attack", "lenet", "resnet"),
    [(GRNN(), 2e-3, 2e-6), (GRNNPolish(), 2e-3, 2e-6), (IG(), 1e-6, 1e-4)],
)
def test_what_is_left_out_takes_the_value_of_the_model(attack, lenet, resnet):
    assert for_model(attack, "lenet").tv == lenet
    assert for_model(attack, "resnet18").tv == resnet


@pytest.mark.parametrize("tv", [0.0, 0.5])
def test_what_the_user_gave_stays(tv):
    assert for_model(IG(tv=tv), "resnet18") == IG(tv=tv)


@pytest.mark.parametrize(("attack", "tv"), [(GRNN(width=4), 2e-3), (IG(), 1e-6), (IG(tv=0.5), 0.5)])
def test_the_weight_that_an_attack_uses_is_the_one_in_its_settings(
    observe, tiny, monkeypatch, attack, tv
):
    used = []
    untouched = TotalVariation.__call__

    def spy(self, problem, images):
        used.append(self.weight)
        return untouched(self, problem, images)

    monkeypatch.setattr(TotalVariation, "__call__", spy)
    found = attack(observe(tiny[0][:1], tiny[1][:1]), budget=Budget(iterations=1))
    assert found.settings["tv"] == tv
    assert set(used) == {tv}


def test_a_residual_network_takes_the_papers_weights(observe):
    seen = observe(torch.rand(1, 3, 8, 8), torch.tensor([1]), model="resnet20")
    found = GRNN(width=4, latent=4)(seen, budget=Budget(iterations=1))
    assert found.settings["tv"] == 2e-6


def test_every_default_by_model_stands_in_the_documentation_with_its_source():
    text = DOCS.read_text()
    for default in MODEL_DEFAULTS:
        value = f"{default.value:g}".replace("e-0", "e-").replace("0.002", "2e-3")
        value = value.replace("0.0001", "1e-4")
        assert f"{value} | {default.source} |" in text, default
