"""Maui: images from the update of a head behind a frozen backbone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import observed
from refusals import check_refusal, refused
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from bract.attacks import Budget, Case, Reconstruction, Refusal, attack, reconstruct
from bract.attacks.methods.maui.features import gradient_residual, read_features
from bract.attacks.methods.maui.head import probe_inputs, trained_head
from bract.attacks.methods.maui.maui import MATCHED, Maui
from bract.attacks.problem.case import open_case
from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract.models import MODELS, create_model
from bract.models.frozen import with_frozen_backbone
from bract.models.initialise import initialise
from bract.scores import match, psnr

EACH_ONCE = torch.tensor([3, 0, 7, 5])


def network(name: str = "lenet-strided", activation: str = "sigmoid", size: int = 8) -> nn.Module:
    made = create_model(name, classes=10, channels=1, image_size=size, activation=activation)
    return initialise(made, "default", 0).eval()


def behind_frozen(
    model: nn.Module, images: Tensor, labels: Tensor, trained: str = "classifier", **declared: Any
) -> Any:
    """What a client uploads that trains a head alone, and what enters the head."""
    frozen = with_frozen_backbone(model, [trained])
    MODELS._entries["test-frozen"] = lambda **_: frozen
    seen = observed(images, labels, model=frozen, name="test-frozen", norm_mode="eval", **declared)
    return seen, opened(seen)


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "test-frozen", lambda **_: nn.Identity())


def opened(seen: Any) -> Case:
    return open_case(seen, tier="oblivious", max_images=32)


def true_features(case: Case, images: Tensor) -> Tensor:
    head, state = trained_head(case), case.target_model.captured(case.observation, torch.float64)
    return head.features(state, case.target_model.normalise(images).double()).detach()


def worst_error(found: Tensor | None, wanted: Tensor) -> float:
    """Largest relative error of a row, under the best assignment of rows."""
    assert found is not None
    apart = torch.cdist(found, wanted) / wanted.norm(dim=1)
    rows, columns = linear_sum_assignment(apart.numpy())
    return float(apart[rows, columns].max())


@pytest.mark.parametrize("name", ["lenet-strided", "resnet20"])
def test_the_features_of_one_image_are_exact(name: str, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    _, case = behind_frozen(network(name), images, labels)
    found = read_features(case, trained_head(case), starts=1, seed=0)
    assert worst_error(found.values, true_features(case, images)) < 1e-5
    assert found.labels is not None and found.labels.tolist() == labels.tolist()
    assert found.certificate.residual < 1e-5


def test_local_steps_on_one_image_leave_its_features_exact(tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    _, case = behind_frozen(network(), images, labels, steps=4, lr=0.1)
    found = read_features(case, trained_head(case), starts=1, seed=0)
    assert worst_error(found.values, true_features(case, images)) < 1e-4


def test_a_batch_of_other_classes_each_is_read_off_a_last_layer(tiny: Any) -> None:
    images = tiny[0][:4]
    _, case = behind_frozen(network(), images, EACH_ONCE)
    found = read_features(case, trained_head(case), starts=4, seed=0)
    assert worst_error(found.values, true_features(case, images)) < 1e-3
    assert found.certificate.residual < 1e-5
    assert found.component == "mixtures of the head's row space"


def test_more_images_than_classes_are_read_off_a_hidden_layer_with_a_relu() -> None:
    images = load_test_data(DataConfig(name="digits", image_size=32))[0][:8]
    labels = torch.arange(8) % 3
    model = create_model("lenet", classes=3, channels=1, image_size=32, activation="relu")
    model = initialise(model, "default", 1).eval()
    _, case = behind_frozen(model, images, labels, classes=3)
    found = read_features(replace(case, images=8), trained_head(case), starts=1, seed=0)
    assert found.component == "sparse factors of the head"
    assert worst_error(found.values, true_features(case, images)) < 1e-4
    assert found.labels is not None
    assert found.labels.bincount(minlength=3).tolist() == [3, 3, 2]


def test_a_few_images_are_read_off_a_smooth_hidden_layer(digits: Any) -> None:
    images = digits[0][:3]
    _, case = behind_frozen(network("lenet", size=16), images, EACH_ONCE[:3])
    found = read_features(case, trained_head(case), starts=8, seed=0)
    assert found.component == "mixtures of the head's row space"
    assert worst_error(found.values, true_features(case, images)) < 1e-2


def test_the_heads_gradient_is_that_of_the_whole_model(tiny: Any) -> None:
    images = tiny[0][:4]
    seen, case = behind_frozen(network("lenet", "relu", 16), tiny_at_16(images), EACH_ONCE)
    head, state = trained_head(case), case.target_model.captured(case.observation)
    features = head.features(state, case.target_model.normalise(tiny_at_16(images)))
    rows = nn.functional.one_hot(EACH_ONCE, 10).float()
    weight, bias = head.gradient(state, probe_inputs(case, 1, 0), features, rows)
    assert torch.allclose(weight, seen.update[head.site.weight], atol=1e-6)
    assert torch.allclose(bias, seen.update[head.site.bias], atol=1e-6)
    assert gradient_residual(case, head, features.detach().double(), EACH_ONCE) < 1e-5


def tiny_at_16(images: Tensor) -> Tensor:
    return nn.functional.interpolate(images, size=(16, 16))


def test_best_inverts_the_features_of_a_head(digits: Any) -> None:
    images, labels = digits[0][:2], EACH_ONCE[:2]
    seen, _ = behind_frozen(network("lenet-strided", "relu", 16), images, labels)
    found = attack("best")(seen, budget=Budget(iterations=200))
    assert found.method == "maui" and found.pick.loss < MATCHED


@pytest.mark.parametrize("batch", [1, 2])
def test_digits_come_back_through_a_frozen_backbone(batch: int, digits: Any) -> None:
    images, labels = digits[0][:batch], EACH_ONCE[:batch]
    seen, _ = behind_frozen(network(size=16), images, labels)
    found = Maui()(seen, budget=Budget(iterations=200))
    order = match(found.images, images)
    assert float(psnr(found.images[order], images).min()) > 20
    assert found.labels[order].tolist() == labels.tolist()
    assert found.gradient_residual is not None
    assert found.gradient_residual < 1e-2


def test_no_attack_takes_the_zero_update_of_frozen_parameters_for_their_gradient(
    digits: Any,
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    seen = observed(images, labels, activation="sigmoid")
    update = {
        name: value if name.startswith("classifier") else torch.zeros_like(value)
        for name, value in seen.update.items()
    }
    target = opened(replace(seen, update=update)).evidence.target
    assert target and all(name.startswith("classifier") for name in target)


def test_results_do_not_depend_on_batch_companions(digits: Any) -> None:
    model = network(size=16)
    one, _ = behind_frozen(model, digits[0][:1], digits[1][:1])
    other = replace(observed(digits[0][1:2], digits[1][1:2], model=model), client="other")
    other = replace(other, declaration=one.declaration)
    MODELS._entries["test-frozen"] = lambda **_: model
    budget = Budget(iterations=30)
    both = reconstruct([one, other], "maui", budget=budget, device="cpu")
    assert not isinstance(both[1], Refusal)
    alone = Maui()(other, budget=budget).images
    assert torch.allclose(both[1].images, alone, atol=1e-4)


def refusal(seen: Any) -> str:
    (found,) = reconstruct(seen, "maui", device="cpu")
    assert isinstance(found, Refusal)
    return found.reason


def test_an_update_that_holds_the_backbone_is_refused_by_name(observe: Any, tiny: Any) -> None:
    reason = refusal(observe(tiny[0][:1], tiny[1][:1]))
    assert "the update holds features.0.weight, features.0.bias, features.2.weight and" in reason
    assert "such as ig or best" in reason


def test_what_has_no_frozen_layer_is_refused(observe: Any, tiny: Any) -> None:
    reason = refusal(observe(tiny[0][:1], tiny[1][:1], model="mlp"))
    assert "nothing before" in reason
    assert "analytic and spear read" in reason


def test_a_head_without_bias_is_refused(tiny: Any) -> None:
    model = network()
    model.classifier = nn.Sequential(nn.Flatten(), nn.Linear(48, 10, bias=False))
    seen, _ = behind_frozen(model, tiny[0][:1], tiny[1][:1])
    assert "classifier.1 has no bias" in refusal(seen)


def test_more_images_than_a_last_layer_determines_are_refused(tiny: Any) -> None:
    seen, _ = behind_frozen(network(), tiny[0][:12], tiny[1][:12])
    (found,) = reconstruct(seen, "maui", budget=Budget(max_images=12), device="cpu")
    assert isinstance(found, Refusal)
    check_refusal(found, "attack-unsuited", 12, 9)


def test_a_batch_after_several_steps_is_refused(tiny: Any) -> None:
    seen, _ = behind_frozen(network(), tiny[0][:2], tiny[1][:2], steps=3)
    assert "one step of plain SGD" in refusal(seen)


def test_features_that_explain_nothing_are_refused(tiny: Any) -> None:
    seen, _ = behind_frozen(network(), tiny[0][:4], EACH_ONCE)
    drawn = torch.Generator().manual_seed(0)
    noisy = {
        name: value + 0.1 * value.std() * torch.randn(value.shape, generator=drawn)
        for name, value in seen.update.items()
    }
    assert "no features of 4 images explain" in refusal(replace(seen, update=noisy))


@pytest.mark.parametrize("setting", ["starts", "history"])
def test_bad_settings_are_refused(setting: str) -> None:
    with refused("config-value", setting, 0):
        Maui(**{setting: 0})


def test_auto_lets_it_compete_where_a_head_alone_was_trained(digits: Any) -> None:
    images, labels = digits
    seen, case = behind_frozen(network("lenet-strided", "relu", 16), images[:1], labels[:1])
    assert Maui().suits(case)
    (found,) = reconstruct([seen], "auto", budget=Budget(iterations=40), device="cpu")
    assert isinstance(found, Reconstruction)
    assert {"best", "ig", "maui"} <= {trial.attack for trial in found.trials}
    whole = observed(images[:1], labels[:1], model="lenet-strided", norm_mode="eval")
    assert not Maui().suits(opened(whole))
