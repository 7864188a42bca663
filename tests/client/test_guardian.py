import logging
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bract.client.defenses import Guardian, ProtectContext

HERE = ProtectContext()


def gradient(size: Any = 4000, norm: Any = 2.0, seed: Any = 0) -> Any:
    # Heavy tails, as gradients have: most coordinates are far below the root mean square.
    g = torch.randn(size, generator=torch.Generator().manual_seed(seed)) ** 3
    return g * (norm / g.norm())


def reference(g: Any, *, epsilon: Any, beta: Any, iterations: Any, lr: Any, optimizer: Any) -> Any:
    """Equation 5 by automatic differentiation, the constraints as projections."""
    delta: Any = torch.nn.Parameter(g.clone())
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    steps = kind([delta], lr=lr)
    for _ in range(iterations):
        steps.zero_grad()
        dot = g @ delta
        pmm = (epsilon * g.norm() - dot).abs()
        ppm = dot.abs() / (g.norm() * delta.norm())
        (pmm + beta * ppm).backward()
        steps.step()
        with torch.no_grad():
            if g @ delta < 0:
                delta -= (g @ delta) / (g @ g) * g
            if delta.norm() > epsilon:
                delta *= epsilon / delta.norm()
    return delta.detach()


# Plain descent that has reached the bound sits on the corner of |eps |g| - g.delta|, where rounding
# decides the side; so it is compared below the bound only.
@pytest.mark.parametrize(
    ("optimizer", "norm"), [("adam", 0.3), ("adam", 2.0), ("adam", 8.0), ("sgd", 0.3)]
)
@pytest.mark.parametrize("beta", [0.1, 10.0])
def test_the_analytic_steps_are_those_of_automatic_differentiation(
    optimizer: Any, norm: Any, beta: Any
) -> None:
    g = gradient(norm=norm).double()
    settings = {"epsilon": 1.37, "beta": beta, "iterations": 6, "lr": 1e-3, "optimizer": optimizer}
    fast = Guardian(**settings, min_cosine=0.0, length="bound").solve(g, settings["epsilon"])
    torch.testing.assert_close(fast, reference(g, **settings), rtol=1e-6, atol=1e-9)


def test_ten_adam_steps_turn_the_update_and_plain_descent_never_does() -> None:
    g = gradient(60_000, norm=2.0)

    def cosine(delta: Any) -> float:
        return float(F.cosine_similarity(g, delta, dim=0))

    assert cosine(Guardian().solve(g, 1.0)) == pytest.approx(0.3, abs=0.01)
    for lr in (1e-3, 1e-1):
        assert cosine(Guardian(optimizer="sgd", lr=lr).solve(g, 1.0)) == pytest.approx(
            1.0, abs=1e-4
        )


@pytest.mark.parametrize("norm", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("min_cosine", [0.0, 0.3])
def test_the_bounds_hold_at_every_scale(norm: Any, min_cosine: Any) -> None:
    g = gradient(norm=norm)
    defense = Guardian(epsilon=0.5, min_cosine=min_cosine, length="bound")
    delta = defense.solve(g, 0.5)
    assert float(delta.norm()) <= 0.5 * (1 + 1e-5)
    assert float(F.cosine_similarity(g, delta, dim=0)) >= min_cosine - 1e-3


def test_the_sent_update_has_the_length_of_the_true_one_unless_the_bound_is_asked_for() -> None:
    update = {"w": gradient(norm=0.01), "b": gradient(50, norm=0.02)}
    norm = math.hypot(0.01, 0.02)
    sent = Guardian().protect(update, {}, HERE)
    assert math.hypot(*(float(v.norm()) for v in sent.values())) == pytest.approx(norm, rel=1e-4)
    sent = Guardian(length="bound").protect(update, {}, HERE)
    assert math.hypot(*(float(v.norm()) for v in sent.values())) > 5 * norm


def test_per_tensor_problems_share_the_bound() -> None:
    update = {"w": gradient(norm=4.0), "b": gradient(50, norm=3.0)}
    defense = Guardian(scope="tensor", length="bound")
    sent = defense.protect(update, {}, HERE)
    torch.testing.assert_close(
        sent["w"], defense.solve(update["w"], math.sqrt(0.5)), rtol=1e-6, atol=0
    )
    assert math.hypot(*(float(v.norm()) for v in sent.values())) <= 1.0 + 1e-5


def test_cosine_and_norm_ratio_are_reported_and_a_high_cosine_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    update = {"w": gradient(60_000)}
    turned = Guardian()
    with caplog.at_level(logging.WARNING):
        turned.protect(update, {}, HERE)
    assert not caplog.records
    assert turned.report == pytest.approx({"cosine": 0.3, "norm_ratio": 1.0}, abs=0.01)
    with caplog.at_level(logging.WARNING):
        Guardian(optimizer="sgd").protect(update, {}, ProtectContext(round=7))
    assert "round 7" in caplog.text
    assert "cosine 1.000" in caplog.text


def test_a_zero_update_stays_zero() -> None:
    sent = Guardian().protect({"w": torch.zeros(5)}, {}, HERE)
    assert torch.equal(sent["w"], torch.zeros(5))
