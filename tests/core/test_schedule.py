"""The learning rate of a round, by hand and against PyTorch's schedulers."""

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch.optim import lr_scheduler

from bract.config.config import TrainingConfig
from bract.config.schedule import (
    ConstantRate,
    CosineRate,
    ExponentialRate,
    LrSchedule,
    StepRate,
    scheduled_lr,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ConstantRate(kind="constant"), [0.8, 0.8, 0.8, 0.8, 0.8]),
        (StepRate(kind="step", factor=0.5, every=2), [0.8, 0.8, 0.4, 0.4, 0.2]),
        (ExponentialRate(kind="exponential", factor=0.5), [0.8, 0.4, 0.2, 0.1, 0.05]),
        # 0.2 + 0.6 (1 + cos(pi t / 4)) / 2, whose cosines are 1, 1/sqrt 2, 0, -1/sqrt 2, -1.
        (
            CosineRate(kind="cosine", floor=0.2),
            [0.8, 0.5 + 0.3 / math.sqrt(2), 0.5, 0.5 - 0.3 / math.sqrt(2), 0.2],
        ),
        (CosineRate(kind="cosine", rounds=2), [0.8, 0.4, 0.0, 0.0, 0.0]),
    ],
)
def test_the_rate_of_every_round_worked_by_hand(schedule: Any, expected: list[float]) -> None:
    found = [scheduled_lr(0.8, schedule, r, 4) for r in range(1, 6)]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        (
            StepRate(kind="step", factor=0.3, every=3),
            lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.3),
        ),
        (
            ExponentialRate(kind="exponential", factor=0.9),
            lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
        ),
        (
            CosineRate(kind="cosine", floor=0.01),
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=12, eta_min=0.01),
        ),
    ],
)
def test_the_rate_is_that_of_torch_where_a_round_is_an_epoch(schedule: Any, theirs: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    scheduler = theirs(optimizer)
    training = TrainingConfig(lr=0.7, lr_schedule=schedule)
    for server_round in range(1, 13):
        wanted = optimizer.param_groups[0]["lr"]
        assert training.at(server_round, 12).lr == pytest.approx(wanted, rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_a_rounds_configuration_is_constant_and_can_be_asked_again() -> None:
    training = TrainingConfig(lr=0.8, lr_schedule=ExponentialRate(kind="exponential", factor=0.5))
    third = training.at(3, 5)
    assert third.lr == pytest.approx(0.2)
    assert third.at(3, 5) == third
    assert training.lr == 0.8


def test_a_kind_alone_takes_the_defaults() -> None:
    read: TypeAdapter[Any] = TypeAdapter(LrSchedule)
    assert read.validate_python("step") == StepRate(kind="step", factor=0.1, every=10)
