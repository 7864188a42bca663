import itertools
import math

import pytest
import torch

from bract.updates.momentum import LISTED, mean_velocity, response, root_of_squares, velocities

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


def test_a_pull_back_as_worked_by_hand() -> None:
    """Two steps of 1 with half the way taken back: places 0 and 1, end 1.5.

    The first gradient is in the end 1 - 0.5 times and was taken at 0, the second once at 1: the
    mean place is 1 / 1.5 of the way to 1, and that is 1 / 1.5 of the whole.
    """
    assert response(0.0, 0.5, 2) == pytest.approx((0.75, 1 / 1.5 / 1.5))
    assert response(0.5, 0.0, 3) == pytest.approx((4.25 / 3, (1.5 * 1 + 1 * 2.5) / 4.25**2))


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 0.03), (0.9, 0.002), (0.5, 0.4)])
def test_a_response_is_the_optimizers_own(momentum: float, pull: float) -> None:
    """What each gradient adds to the end, by leaving out one after the other."""

    def places(gradients: list[float]) -> list[float]:
        weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
        found = [0.0]
        for gradient in gradients:
            weight.grad = torch.full_like(weight, gradient) + pull * weight.detach()
            optimizer.step()
            found.append(-float(weight.detach()))
        return found

    steps = 12
    way = places([1.0] * steps)
    parts = [way[-1] - places([float(i != k) for i in range(steps)])[-1] for k in range(steps)]
    mean = sum(part * place for part, place in zip(parts, way[:-1], strict=True))
    assert sum(parts) == pytest.approx(way[-1])
    assert response(momentum, pull, steps) == pytest.approx((way[-1] / steps, mean / way[-1] ** 2))


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 1e-3), (0.9, 1e-5), (0.9999, 1e-7)])
def test_many_steps_are_what_they_come_to_one_by_one(momentum: float, pull: float) -> None:
    steps = 2 * LISTED
    speed, place = 0.0, 0.0
    for _ in range(steps):
        speed = momentum * speed + 1.0 - pull * place
        place += speed
    assert response(momentum, pull, steps)[0] == pytest.approx(place / steps)


def test_steps_that_end_where_they_began_are_answered() -> None:
    assert response(0.5, 2.5, 2) == (0.0, 1.0)
    assert abs(response(0.99, 0.9218306162374207, 18)[0]) < 1e-12


def test_a_claim_of_a_billion_pulled_steps_is_answered() -> None:
    gain, place = response(0.9, 1e-7, HUGE)
    assert gain == pytest.approx(0.01, rel=1e-2) and 0.98 < place <= 1.0
    assert response(0.9, 1e-30, HUGE) == pytest.approx((10.0, 0.5), rel=1e-2)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("share", [1e-6, 1e-3, 0.01, 0.3])
@pytest.mark.parametrize("steps", [1, 17, 50, 5000, HUGE])
def test_every_pull_that_converges_has_a_place_on_the_way(
    momentum: float, share: float, steps: int
) -> None:
    gain, place = response(momentum, share * 2.0 * (1.0 + momentum), steps)
    assert gain > 0.0 and 0.0 <= place <= 1.0
