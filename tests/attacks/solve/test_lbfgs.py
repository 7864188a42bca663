from typing import Any

import pytest
import torch

from bract.attacks.solve.lbfgs import BatchedLBFGS


def rosenbrock(points: Any) -> Any:
    x, y = points[:, 0], points[:, 1]
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def minimise(start: Any, function: Any, steps: Any, **settings: Any) -> Any:
    points = start.clone().requires_grad_()
    optimizer = BatchedLBFGS({"points": points}, **settings)

    def evaluate() -> Any:
        points.grad = None
        losses = function(points)
        losses.sum().backward()
        return losses.detach()

    for _ in range(steps):
        optimizer.step(evaluate, 0.0)
    return points.detach(), optimizer


def test_every_trial_finds_the_minimum_of_rosenbrocks_valley() -> None:
    start = torch.tensor([[-1.2, 1.0], [2.0, -3.0], [0.0, 0.0]], dtype=torch.float64)
    found, _ = minimise(start, rosenbrock, 60)
    assert torch.allclose(found, torch.ones_like(found), atol=1e-6)


def test_a_trial_takes_the_same_path_alone_and_in_company() -> None:
    start = torch.tensor([[-1.2, 1.0], [2.0, -3.0]], dtype=torch.float64)
    together, _ = minimise(start, rosenbrock, 10)
    for trial in range(2):
        alone, _ = minimise(start[trial : trial + 1], rosenbrock, 10)
        assert torch.allclose(together[trial : trial + 1], alone, rtol=1e-9)


def test_an_ill_conditioned_quadratic_beats_steepest_descent() -> None:
    scales = torch.logspace(0, 6, 10, dtype=torch.float64)

    def bowl(points: Any) -> Any:
        return (scales * points**2).sum(dim=1)

    start = torch.ones(1, 10, dtype=torch.float64)
    found, _ = minimise(start, bowl, 120)
    assert float(bowl(found)) < 1e-10


def test_a_trial_with_infinite_loss_does_not_disturb_the_others() -> None:
    def walled(points: Any) -> Any:
        return torch.where(points[:, 0] > 5, float("nan"), rosenbrock(points))

    start = torch.tensor([[-1.2, 1.0], [6.0, 1.0]], dtype=torch.float64)
    found, _ = minimise(start, walled, 60)
    assert found[0].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_restored_optimizer_continues_as_if_never_interrupted() -> None:
    start = torch.tensor([[-1.2, 1.0]], dtype=torch.float64)
    whole, _ = minimise(start, rosenbrock, 12)
    half, first = minimise(start, rosenbrock, 6)
    points = half.clone().requires_grad_()
    second = BatchedLBFGS({"points": points})
    second.restore(first.state())

    def evaluate() -> Any:
        points.grad = None
        losses = rosenbrock(points)
        losses.sum().backward()
        return losses.detach()

    for _ in range(6):
        second.step(evaluate, 0.0)
    assert torch.equal(points.detach(), whole)
