import math
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from bract.attacks import IG, Budget, attack
from bract.attacks.problem.batched_network import BatchedNetwork
from bract.attacks.solve.switching import SwitchingUnits
from bract.models import create_model


def test_values_and_slopes_are_those_of_relu() -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for function in (F.relu, torch.relu, torch.Tensor.relu, nn.ReLU(inplace=True)):
        with SwitchingUnits(0.1):
            made = function(values * 1.0)
        assert torch.equal(made, values.clamp_min(0.0))
        (slope,) = torch.autograd.grad(made.sum(), values)
        assert torch.equal(slope, (values > 0).float())


def test_the_slope_s_derivative_is_a_normal_density_of_the_given_width() -> None:
    # Root mean square of (3, -4) is sqrt(12.5); the density at z is that of N(0, (0.5 rms)^2).
    values = torch.tensor([[3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    with SwitchingUnits(0.5):
        (slope,) = torch.autograd.grad(values.relu().sum(), values, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), values)
    deviation = 0.5 * math.sqrt(12.5)
    expected = [
        math.exp(-0.5 * (z / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi)) for z in (3, 4)
    ]
    assert second[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_without_it_the_slope_has_no_derivative() -> None:
    values = torch.tensor([[3.0, -4.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(values.relu().sum(), values, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), values)
    assert second.tolist() == [[0.0, 0.0]]


def test_a_trial_s_derivative_does_not_depend_on_the_others() -> None:
    values = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def second(rows: torch.Tensor) -> torch.Tensor:
        with SwitchingUnits(0.3):
            (slope,) = torch.autograd.grad(rows.relu().sum(), rows, create_graph=True)
        return torch.autograd.grad(slope.sum(), rows)[0]

    alone = second(values[:1].detach().requires_grad_())
    with_a_large_one = torch.cat([values[:1], 100 * values[1:]]).detach().requires_grad_()
    torch.testing.assert_close(second(with_a_large_one)[:1], alone)


def test_a_traced_network_has_the_second_derivatives_of_one_trial_after_the_other() -> None:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    model = model.double()
    network = BatchedNetwork.of(model)
    assert network is not None
    state = {
        name: torch.randn(2, *value.shape, generator=generator, dtype=torch.float64)
        for name, value in model.named_parameters()
    }
    images = torch.randn(2, 1, 1, 6, 6, generator=generator, dtype=torch.float64).requires_grad_()

    def one(parameters: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(model, parameters, (inputs,)).square().sum()
        return found

    def matched(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((value.sin().sum() for value in gradient.values()), torch.zeros(()))

    with SwitchingUnits(0.2):
        traced = grad(lambda at: network(at, images).square().sum())(state)
        alone = [grad(one)({n: v[i] for n, v in state.items()}, images[i]) for i in range(2)]
        mapped = vmap(grad(one))(state, images)
    (found,) = torch.autograd.grad(matched(traced), images)
    apart = sum((matched(gradient) for gradient in alone), torch.zeros(()))
    (expected,) = torch.autograd.grad(apart, images)
    (together,) = torch.autograd.grad(matched(mapped), images)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(together, expected)


def test_ig_searches_with_units_that_may_switch(observe: Any, digits: Any) -> None:
    torch.manual_seed(0)
    network = create_model("resnet20", classes=10, channels=1, image_size=16, activation="relu")
    seen = observe(
        digits[0][:1, :, ::2, ::2],
        digits[1][:1],
        model=network.eval(),
        name="resnet20",
        activation="relu",
        norm_mode="eval",
    )
    budget = Budget(iterations=5)
    without, within = (IG(switching=width)(seen, budget=budget) for width in (0.0, 0.1))
    assert not torch.equal(without.images, within.images)


def test_a_width_below_zero_is_refused() -> None:
    with refused("config-value", "switching"):
        attack("ig", switching=-0.1)


@pytest.mark.parametrize("width", [1e-300, 1e30])
def test_widths_beyond_all_sense_leave_finite_derivatives(width: float) -> None:
    values = torch.tensor([[0.0, 0.0], [3.0, -4.0]], requires_grad=True)
    with SwitchingUnits(width):
        (slope,) = torch.autograd.grad(values.relu().sum(), values, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), values)
    assert bool(second.isfinite().all())
    assert second[0].tolist() == [0.0, 0.0]


def test_a_relu_that_stands_alone_changes_its_values_in_place() -> None:
    for function in (F.relu_, lambda x: F.relu(x, inplace=True), torch.Tensor.relu_):
        values = torch.tensor([3.0, -4.0]) * 1.0
        with SwitchingUnits(0.1):
            function(values)
        assert values.tolist() == [3.0, 0.0]
