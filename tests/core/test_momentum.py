import itertools
import math

import pytest
import torch

from bract.protocol.momentum import LISTED, mean_velocity, root_of_squares, velocities

HUGE = 10**9


def reference(momentum: float, steps: int) -> list[float]:
    """How far each step of torch's own SGD moves a weight whose gradient is 1."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    places = [0.0]
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        places.append(-float(weight.detach()))
    return [after - before for before, after in itertools.pairwise(places)]


def test_three_velocities_by_hand() -> None:
    """1, 0.5 + 1 and 0.75 + 1."""
    assert velocities(0.5, 3) == (1.0, 1.5, 1.75)
    assert mean_velocity(0.5, 3) == pytest.approx(4.25 / 3)
    assert root_of_squares(0.5, 3) == pytest.approx(math.sqrt(1 + 2.25 + 3.0625))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [1, 7, 300])
def test_velocities_are_those_of_the_optimizer(momentum: float, steps: int) -> None:
    each = reference(momentum, steps)
    assert velocities(momentum, steps) == pytest.approx(each)
    assert mean_velocity(momentum, steps) == pytest.approx(sum(each) / steps)
    assert root_of_squares(momentum, steps) == pytest.approx(math.sqrt(sum(v * v for v in each)))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_more_steps_than_are_listed_count_as_they_would_one_by_one(momentum: float) -> None:
    steps = 2 * LISTED
    speed, total, squares = 0.0, 0.0, 0.0
    for _ in range(steps):
        speed = momentum * speed + 1.0
        total += speed
        squares += speed**2
    assert mean_velocity(momentum, steps) == pytest.approx(total / steps, rel=1e-4)
    assert root_of_squares(momentum, steps) == pytest.approx(math.sqrt(squares), rel=1e-4)


def test_a_claim_of_a_billion_steps_lists_no_billion() -> None:
    assert len(velocities(0.9, HUGE)) == LISTED
    assert mean_velocity(0.9, HUGE) == pytest.approx(10.0)
    assert root_of_squares(0.9, HUGE) == pytest.approx(10.0 * math.sqrt(HUGE))
    assert math.isfinite(mean_velocity(1.0 - 2**-53, HUGE))
