"""One law says how an update follows from a client's gradients; each value is worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bract import Observation
from bract.schema import ClientDeclaration


def seen(**declared: Any) -> Observation:
    """Return an upload of one weight of 4 that moved by 0.6."""
    return Observation(
        round=1,
        client="c",
        parameters={"w": torch.tensor([4.0])},
        update={"w": torch.tensor([0.6])},
        declaration=ClientDeclaration(**declared),
    )


def test_a_gradient_is_one_step_whatever_else_is_declared() -> None:
    law = seen(algorithm="fedsgd", lr=0.1, local_steps=5, momentum=0.9, optimizer="adam").law
    assert law.one_step and law.one_gradient and law.linear and law.scaled
    assert (law.steps, law.counted, law.rate, law.to_gradient) == (1, 1, 1.0, 1.0)
    assert (law.gain, law.noise_gain, law.decayed) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("declared", "one_gradient"),
    [
        ({"local_steps": 1}, True),
        ({"local_steps": 1, "optimizer": "adam"}, False),
        ({"local_steps": 1, "optimizer": "nesterov"}, False),
        ({"local_steps": 1, "max_grad_norm": 1.0}, False),
        ({"local_steps": 2}, False),
        ({}, False),
    ],
)
def test_one_step_of_plain_sgd_is_one_gradient(
    declared: dict[str, Any], one_gradient: bool
) -> None:
    assert seen(lr=0.1, **declared).law.one_gradient is one_gradient


def test_without_a_rate_or_steps_the_factor_is_one_and_not_known() -> None:
    for declared in ({"lr": 0.1}, {"local_steps": 3}, {"lr": 0.0, "local_steps": 3}):
        upload = seen(**declared)
        assert not upload.law.scaled and upload.law.rate == 1.0
        assert torch.equal(upload.gradient()["w"], upload.update["w"])


def test_three_steps_at_a_fifth_move_by_three_fifths_of_a_gradient_of_one() -> None:
    upload = seen(lr=0.2, local_steps=3)
    assert upload.law.rate == pytest.approx(0.6)
    assert upload.gradient()["w"] == pytest.approx(1.0)


def test_momentum_leads_further_and_adds_the_noise_of_earlier_steps() -> None:
    """Velocities of momentum 0.5 are 1, 1.5 and 1.75; Nesterov's directions 1.5, 1.75, 1.875."""
    heavy = seen(lr=0.2, local_steps=3, momentum=0.5).law
    assert heavy.gain == pytest.approx((1.0 + 1.5 + 1.75) / 3)
    assert heavy.noise_gain == pytest.approx(math.sqrt(1.0 + 1.5**2 + 1.75**2) / 3)
    ahead = seen(lr=0.2, local_steps=3, momentum=0.5, optimizer="nesterov").law
    assert ahead.linear and ahead.gain == pytest.approx((1.5 + 1.75 + 1.875) / 3)


def test_decay_is_read_off_undefended_steps_of_sgd_alone() -> None:
    """A weight of 4 decays by 0.05 of itself a step: 0.2 of the gradient of 1 are its own."""
    upload = seen(lr=0.2, local_steps=3, weight_decay=0.05)
    assert upload.law.decayed == pytest.approx(0.05)
    assert upload.gradient()["w"] == pytest.approx(0.8)
    for other in ({"optimizer": "adamw"}, {"defenses": ({"name": "fedkl"},)}):
        assert seen(lr=0.2, local_steps=3, weight_decay=0.05, **other).law.decayed == 0.0
