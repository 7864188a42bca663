from typing import Any

import pytest
import torch
from torch import Tensor

from bract.attacks.problem.step_rules import StepSettings, mean_step


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [
        ("sgd", 0.0),
        ("sgd", 0.9),
        ("nesterov", 0.9),
        ("adam", 0.0),
        ("rmsprop", 0.0),
        ("rmsprop", 0.9),
    ],
)
def test_directions_are_those_of_torch(optimizer: str, momentum: float) -> None:
    gradients = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    weight = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    stepper: torch.optim.Optimizer = (
        torch.optim.Adam([weight], lr=0.1)
        if optimizer == "adam"
        else torch.optim.RMSprop([weight], lr=0.1, momentum=momentum)
        if optimizer == "rmsprop"
        else torch.optim.SGD([weight], lr=0.1, momentum=momentum, nesterov=optimizer == "nesterov")
    )
    rule = StepSettings(optimizer=optimizer, momentum=momentum).rule()
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        stepper.step()
        direction = rule({"w": gradient[None]})["w"][0]
        assert torch.allclose(before - weight.detach(), 0.1 * direction, atol=1e-12)


MOMENTA = (0.0, 0.9, 0.0, 0.5)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adam", {"betas": (0.5, 0.8)}),
        ("adam", {"eps": 1e-2, "amsgrad": True}),
        ("adamw", {"eps": 0.3, "betas": (0.5, 0.8), "amsgrad": True}),
        ("adam", {"momenta": (0.9, 0.5, 0.8, 0.1)}),
        ("rmsprop", {"eps": 1e-2, "momentum": 0.9}),
        ("sgd", {"momenta": MOMENTA}),
        ("nesterov", {"momenta": (0.3, 0.9, 0.6, 0.5)}),
    ],
)
def test_other_settings_are_those_of_torch(optimizer: str, settings: dict[str, Any]) -> None:
    """Gradients fall, so that the largest second moment is an earlier one."""
    gradients = [torch.randn(5, dtype=torch.float64) / 4**k for k in range(4)]
    weight = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    given = {k: v for k, v in settings.items() if k != "momenta"}
    momenta = settings.get("momenta", ())
    made: Any = {
        "adam": lambda: torch.optim.Adam([weight], lr=0.1, **given),
        "adamw": lambda: torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, **given),
        "rmsprop": lambda: torch.optim.RMSprop([weight], lr=0.1, **given),
        "sgd": lambda: torch.optim.SGD([weight], lr=0.1, momentum=momenta[0]),
        "nesterov": lambda: torch.optim.SGD([weight], lr=0.1, momentum=momenta[0], nesterov=True),
    }
    stepper = made[optimizer]()
    rule = StepSettings(optimizer=optimizer, **settings).rule()
    for step, gradient in enumerate(gradients):
        if momenta and optimizer == "adam":
            stepper.param_groups[0]["betas"] = (momenta[step], 0.999)
        elif momenta:
            stepper.param_groups[0]["momentum"] = momenta[step]
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        stepper.step()
        direction = rule({"w": gradient[None]})["w"][0]
        assert torch.allclose(before - weight.detach(), 0.1 * direction, atol=1e-12)


def test_a_large_eps_and_amsgrad_as_worked_by_hand() -> None:
    """One gradient of 3 gives m^ = 3 and v^ = 9; a second one of 0 leaves the larger v."""
    settings = StepSettings(optimizer="adam", eps=1.0, amsgrad=True, betas=(0.5, 0.5))
    rule, one = settings.rule(), torch.full((1, 1), 3.0, dtype=torch.float64)
    assert float(rule({"w": one})["w"]) == pytest.approx(3.0 / (3.0 + 1.0))
    # m = 0.75 and m^ = 1; v = 2.25 is below 4.5, which is divided by 1 - 0.5^2.
    assert float(rule({"w": 0.0 * one})["w"]) == pytest.approx(1.0 / (6.0**0.5 + 1.0))


def test_the_first_step_of_adam_is_a_sign_with_a_slope() -> None:
    gradient = torch.tensor([[2.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    direction: Tensor = StepSettings(optimizer="adam").rule()({"w": gradient})["w"]
    assert torch.allclose(direction, torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64))
    (slope,) = torch.autograd.grad(direction.sum(), gradient)
    assert bool((slope > 1e-3).all())
    assert bool((slope < 30.0).all())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_even_gradients_lead_as_far_as_the_mean_step_says(optimizer: str) -> None:
    rule, moved = StepSettings(optimizer=optimizer).rule(), 0.0
    for _ in range(5):
        moved += float(rule({"w": torch.full((1, 1), 0.3, dtype=torch.float64)})["w"])
    assert moved == pytest.approx(5 * mean_step(optimizer, 5), rel=1e-6)
