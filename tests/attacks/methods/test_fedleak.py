"""FedLeak: partial matching and regularised steps on IG's search."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bract.attacks import IG, Budget, attack
from bract.attacks.methods.fedleak import FedLeak
from bract.audit.questions.reconstruction.scores.image import psnr
from bract.errors import BractError

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
        ({"share": 0.0}, "share is 0.0; expected a number above 0, at most 1"),
        ({"share": 1.5}, "share is 1.5; expected a number above 0, at most 1"),
        ({"flatness": -0.1}, "flatness is -0.1; expected a number above 0 or 0, at most 1"),
        ({"radius": 0.0}, "radius is 0.0; expected a number above 0, at most 10"),
        ({"radius": "far"}, "radius is 'far'; expected a number"),
        ({"parts": "rows"}, "parts is 'rows'; expected entries or layers"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BractError, match=message):
        FedLeak(**settings)
