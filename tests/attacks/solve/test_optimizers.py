import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bract.attacks import FirstOrder, FirstOrderSettings
from bract.attacks.solve import optimizers
from bract.attacks.solve.optimizers import BatchedOptimizer, FlatDescent

SETTINGS = {
    "rmsprop": FirstOrderSettings(kind="rmsprop", lr=1e-3, momentum=0.9),
    "adam": FirstOrderSettings(kind="adam", lr=1e-2),
}
PEERS: dict[str, Any] = {
    "rmsprop": lambda v: torch.optim.RMSprop(v, lr=1e-3, momentum=0.9),
    "adam": lambda v: torch.optim.Adam(v, lr=1e-2),
}


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_steps_are_pytorchs_to_the_last_bit(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_PIECE", 7)
    start = torch.randn(3, 5, 2)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    weight = torch.randn(3, 5, 2)
    optimizer, peer = FirstOrder({"x": ours}, SETTINGS[kind]), PEERS[kind]([theirs])

    def evaluate() -> Any:
        loss = (weight * ours - 1).pow(4).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(evaluate, 0.0)
        peer.zero_grad()
        (weight * theirs - 1).pow(4).sum().backward()
        peer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_a_sum_moves_as_the_parameters_it_stands_for(kind: Any) -> None:
    torch.manual_seed(5)
    latent = torch.randn(2, 16, dtype=torch.float64)
    weights = torch.randn(2, 16, 6, dtype=torch.float64, requires_grad=True)
    total = torch.einsum("li,lio->lo", latent, weights).detach().requires_grad_()
    scale = torch.logspace(-4, 2, 6, dtype=torch.float64)
    whole = FirstOrder({"w": weights}, SETTINGS[kind])
    short = FirstOrder({"y": total}, SETTINGS[kind], sums={"y": latent})

    def loss(y: Any) -> Any:
        value = (scale * (y - 1).square()).sum()
        value.backward()
        return value

    for _ in range(20):
        whole.step(lambda: loss(torch.einsum("li,lio->lo", latent, weights)), 0.0)
        short.step(lambda: loss(total), 0.0)
    assert torch.allclose(torch.einsum("li,lio->lo", latent, weights), total, rtol=1e-5)


def test_a_restored_optimizer_goes_on_as_if_it_had_not_stopped() -> None:
    x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))

    def square(value: Any) -> Any:
        loss = value.square().sum()
        loss.backward()
        return loss

    steady = FirstOrder({"x": x}, SETTINGS["adam"])
    first = FirstOrder({"x": y}, SETTINGS["adam"])
    for _ in range(3):
        steady.step(lambda: square(x), 0.0)
        first.step(lambda: square(y), 0.0)
    second = FirstOrder({"x": y}, SETTINGS["adam"])
    second.restore(first.state())
    for _ in range(3):
        steady.step(lambda: square(x), 0.0)
        second.step(lambda: square(y), 0.0)
    assert torch.equal(x, y)


def test_the_reason_for_an_optimizer_of_ones_own_is_the_committed_measurement() -> None:
    results = Path(__file__).parents[3] / "experiments" / "results"
    (path,) = results.glob("optimizers-*-cores.json")
    rows = [row for row in json.loads(path.read_text())["rows"] if row["trials"] == 8]
    whole = [r["iteration_ratio"] for r in rows if "whole layer" in r["implementation"]]
    pixels = [r for r in rows if r["attack"] == "ig"]
    assert f"takes {min(whole):.2f} times as long" in (optimizers.__doc__ or "").replace("\n", " ")
    assert all(abs(row["iteration_ratio"] - 1) < 0.01 for row in pixels)
    assert {r["implementation"] for r in pixels if r["same"]} >= {"torch foreach"}


class _Recorded(BatchedOptimizer):
    """Records the gradient that it is given, and stays where it is."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.gradients: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def step(self, evaluate: Any, progress: float) -> None:
        del progress
        self.losses.append(evaluate())
        assert self.value.grad is not None
        self.gradients.append(self.value.grad.clone())

    def state(self) -> dict[str, Any]:
        return {"steps": len(self.losses)}

    def restore(self, state: dict[str, Any]) -> None:
        self.losses = [torch.zeros(())] * int(state["steps"])


def _quadratic(value: torch.Tensor, curvature: torch.Tensor) -> Any:
    def evaluate() -> torch.Tensor:
        value.grad = None
        losses = 0.5 * (curvature * value.square()).flatten(1).sum(dim=1)
        losses.sum().backward()
        return losses.detach()

    return evaluate


def test_the_regularised_gradient_is_that_of_the_loss_plus_its_gradients_norm() -> None:
    torch.manual_seed(2)
    curvature = torch.rand(3, 2, 4, dtype=torch.float64) + 0.1
    value = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    inner, share, radius = _Recorded(value), 0.3, 0.02
    optimizer = FlatDescent(inner, {"x": value}, share=share, radius=radius)
    start = value.detach().clone()
    optimizer.step(_quadratic(value, curvature), 0.0)
    assert torch.equal(value.detach(), start)

    # The slow reference differentiates the norm twice, trial by trial.
    at = start.clone().requires_grad_()
    losses = 0.5 * (curvature * at.square()).flatten(1).sum(dim=1)
    (first,) = torch.autograd.grad(losses.sum(), at, create_graph=True)
    penalty = share * radius * 8**0.5 * first.flatten(1).norm(dim=1)
    (wanted,) = torch.autograd.grad((losses + penalty).sum(), at)
    assert torch.allclose(inner.gradients[0], wanted, rtol=1e-12)
    assert torch.equal(inner.losses[0], losses.detach())


def test_the_regulariser_of_one_number_is_worked_out_by_hand() -> None:
    # f = 2 x^2 at x = 3: gradient 12; at 3 + 0.5 it is 14; 0.75 * 12 + 0.25 * 14 = 12.5.
    value = torch.tensor([[3.0]], requires_grad=True)
    inner = _Recorded(value)
    optimizer = FlatDescent(inner, {"x": value}, share=0.25, radius=0.5)
    optimizer.step(_quadratic(value, torch.tensor(4.0)), 0.0)
    assert inner.gradients[0].tolist() == [[12.5]]


def test_trials_are_regularised_apart_and_a_flat_point_stays_finite() -> None:
    value = torch.tensor([[3.0], [0.0]], requires_grad=True)
    inner = _Recorded(value)
    FlatDescent(inner, {"x": value}, share=0.25, radius=0.5).step(
        _quadratic(value, torch.tensor(4.0)), 0.0
    )
    assert inner.gradients[0].tolist() == [[12.5], [0.0]]


def test_the_state_of_a_regularised_descent_is_that_of_the_inner_one() -> None:
    value = torch.tensor([[3.0]], requires_grad=True)
    inner = _Recorded(value)
    optimizer = FlatDescent(inner, {"x": value}, share=0.25, radius=0.5)
    optimizer.restore({"steps": 3})
    assert optimizer.state() == {"steps": 3}
