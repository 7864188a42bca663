"""A flow from noise to images: its network and its integration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bract_priors.flow import STEPS, Flow


class Known(Flow):
    """A flow whose velocity is ``times + slope * points``."""

    slope = 0.0

    def velocity(self, points: Tensor, times: Tensor, labels: Tensor | None) -> Tensor:
        return times.view(-1, 1, 1, 1) + self.slope * points


def test_euler_steps_are_added_up_and_pixels_are_those_of_minus_one_to_one() -> None:
    flow = Known((1, 8, 8), width=1)
    # From z the sum of the times is (0 + 1/4 + 2/4 + 3/4) / 4 = 3/8; the pixel (z + 3/8 + 1) / 2.
    assert STEPS == 4
    assert flow(torch.zeros(1, 64)).flatten()[0] == pytest.approx(11 / 16)
    flow.slope = 1.0
    point = 0.5
    for number in range(STEPS):
        point += (number / STEPS + point) / STEPS
    assert flow(torch.full((1, 64), -0.9)).min() >= 0.0
    flow.slope = 0.25
    point = -0.5
    for number in range(STEPS):
        point += (number / STEPS + 0.25 * point) / STEPS
    assert flow(torch.full((1, 64), -0.5)).flatten()[0] == pytest.approx((point + 1) / 2)


def test_pixels_are_clipped_and_their_derivative_is_not() -> None:
    flow = Known((1, 8, 8), width=1)
    noise = torch.full((1, 64), 5.0, requires_grad=True)
    image = flow(noise)
    assert image.max() == 1.0
    image.sum().backward()
    assert noise.grad is not None and noise.grad.flatten()[0] == pytest.approx(0.5)


@pytest.mark.parametrize("size", [8, 9, 28, 32, 64])
def test_a_flow_makes_every_side(size: int) -> None:
    flow = Flow((3, size, size), width=2, classes=4)
    made = flow(torch.randn(2, 3 * size**2), torch.eye(4)[:2])
    assert made.shape == (2, 3, size, size) and made.min() >= 0.0 and made.max() <= 1.0


def test_velocity_depends_on_time_class_and_distant_pixels() -> None:
    flow = Flow((1, 32, 32), width=4, classes=2)
    for parameter in flow.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    points, times, rows = torch.randn(1, 1, 32, 32), torch.tensor([0.3]), torch.eye(2)
    before = flow.velocity(points, times, rows[:1])
    assert not torch.allclose(before, flow.velocity(points, times + 0.2, rows[:1]))
    assert not torch.allclose(before, flow.velocity(points, times, rows[1:]))
    points[..., 0, 0] += 5.0
    assert not torch.allclose(
        before[..., 31, 31], flow.velocity(points, times, rows[:1])[..., 31, 31]
    )


def test_weights_that_overflow_make_grey() -> None:
    flow = Flow((1, 8, 8), width=2)
    for parameter in flow.parameters():
        torch.nn.init.constant_(parameter, 1e30)
    assert flow(torch.randn(1, 64)).isfinite().all()
