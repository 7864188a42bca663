import pytest
import torch
from torch import Tensor

from bract.attacks.problem.step_rules import RULES, mean_step, step_rule


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
    rule = RULES[optimizer](momentum)
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        stepper.step()
        direction = rule({"w": gradient[None]})["w"][0]
        assert torch.allclose(before - weight.detach(), 0.1 * direction, atol=1e-12)


def test_other_betas_are_those_of_torch() -> None:
    gradients = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    weight = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    stepper = torch.optim.Adam([weight], lr=0.1, betas=(0.5, 0.8))
    rule = step_rule("adam", 0.0, (0.5, 0.8))
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        stepper.step()
        direction = rule({"w": gradient[None]})["w"][0]
        assert torch.allclose(before - weight.detach(), 0.1 * direction, atol=1e-12)


def test_the_first_step_of_adam_is_a_sign_with_a_slope() -> None:
    gradient = torch.tensor([[2.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    direction: Tensor = RULES["adam"](0.0)({"w": gradient})["w"]
    assert torch.allclose(direction, torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64))
    (slope,) = torch.autograd.grad(direction.sum(), gradient)
    assert bool((slope > 1e-3).all())
    assert bool((slope < 30.0).all())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_even_gradients_lead_as_far_as_the_mean_step_says(optimizer: str) -> None:
    rule, moved = RULES[optimizer](0.0), 0.0
    for _ in range(5):
        moved += float(rule({"w": torch.full((1, 1), 0.3, dtype=torch.float64)})["w"])
    assert moved == pytest.approx(5 * mean_step(optimizer, 5), rel=1e-6)
