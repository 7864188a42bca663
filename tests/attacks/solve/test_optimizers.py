import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bract.attacks import FirstOrder, FirstOrderSettings
from bract.attacks.solve import optimizers

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
