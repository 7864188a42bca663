"""FedLeak: partial matching and regularised steps on IG's search."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from bract.attacks import IG, Budget, attack
from bract.attacks.methods.fedleak import FedLeak
from bract.attacks.problem.objectives import EachTensor
from bract.attacks.solve.optimizers import BatchedOptimizer, FlatDescent
from bract.audit.questions.reconstruction.scores.image import psnr

BUDGET = Budget(iterations=20)


def test_without_its_two_parts_it_is_ig_to_the_last_bit(observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:2], digits[1][:2])
    found = FedLeak(share=1.0, flatness=0.0)(seen, budget=BUDGET, seed=3)
    assert torch.equal(found.images, IG()(seen, budget=BUDGET, seed=3).images)


@pytest.mark.parametrize("changed", [{"share": 0.5}, {"flatness": 0.5}])
def test_each_part_changes_the_search(changed: dict[str, Any], observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    plain: dict[str, Any] = {"share": 1.0, "flatness": 0.0}
    found = FedLeak(**(plain | changed))(seen, budget=BUDGET, seed=3)
    assert not torch.equal(found.images, IG()(seen, budget=BUDGET, seed=3).images)


def test_the_loss_is_that_of_the_share_that_is_matched(observe: Any, tiny: Any) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    target = seen.gradient()
    small = {
        name: value.abs().flatten().kthvalue(max(1, value.numel() // 2)).values
        for name, value in target.items()
    }
    changed = {
        name: torch.where(value.abs() < small[name], -value, value)
        for name, value in target.items()
    }
    one = FedLeak(share=0.3)(seen, budget=BUDGET, seed=1)
    other = FedLeak(share=0.3)(replace(seen, update=changed), budget=BUDGET, seed=1)
    assert torch.equal(one.images, other.images)


def test_a_digit_comes_back(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    found = attack("fedleak")(
        observe(images, labels, init="uniform"), budget=Budget(iterations=150)
    )
    assert float(psnr(found.images, images)[0]) > 20
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert "gradient regularisation" in found.components


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0.0}, ("config-value", "share", "0.0", "0", "1")),
        ({"share": 1.5}, ("config-value", "share", "1.5", "0", "1")),
        ({"flatness": -0.1}, ("config-value", "flatness", "-0.1", "0", "1")),
        ({"radius": 0.0}, ("config-value", "radius", "0.0", "-10", "10", "0")),
        ({"radius": "far"}, ("config-value", "radius", "far", "-10")),
        ({"parts": "rows"}, ("config-value", "parts", "rows", "entries", "layers")),
        ({"search": "latent"}, ("config-value", "search", "latent", "pixels", "generator")),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: tuple[str, ...]) -> None:
    with refused(*message):
        FedLeak(**settings)


def test_the_released_search_trains_a_generator_on_each_tensor_s_match(
    observe: Any, tiny: Any
) -> None:
    released = FedLeak(
        search="generator",
        objective=EachTensor(0.5),
        share=1.0,
        flatness=0.3,
        radius=-0.01,
        lr=0.01,
        schedule="cosine",
        tv=1e-5,
    )
    images = torch.nn.functional.interpolate(tiny[0][:1], (8, 8))
    seen = observe(images, tiny[1][:1], init="uniform")
    found = released(seen, budget=Budget(iterations=60))
    assert {"generator", "matching of each tensor", "gradient regularisation"} <= set(
        found.components
    )
    assert float(psnr(found.images, images)[0]) > 12


class Keep(BatchedOptimizer):
    """Keeps the gradient that it is given."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.seen = value, torch.zeros(0)

    def step(self, evaluate: Any, progress: float) -> None:
        evaluate()
        assert self.value.grad is not None
        self.seen = self.value.grad.clone()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        del state


@pytest.mark.parametrize(("radius", "expected"), [(0.5, 2.5), (-0.5, 1.5)])
def test_the_second_gradient_lies_downhill_where_the_radius_is_negative(
    radius: float, expected: float
) -> None:
    # f(x) = x^2 at 1: its gradient is 2 x, at 1 + r it is 2 (1 + r).
    x = torch.ones(1, 1, requires_grad=True)

    def evaluate() -> torch.Tensor:
        x.grad = None
        loss = x.square().sum(dim=1)
        loss.sum().backward()
        return loss.detach()

    inner = Keep(x)
    FlatDescent(inner, {"x": x}, share=0.5, radius=radius).step(evaluate, 0.0)
    assert inner.seen.item() == expected
