"""Optimizers over many lanes at once: no step in one lane depends on another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bract.update import Tensors

Evaluate = Callable[[], Tensor]
"""Compute the loss ``(L,)`` at the current variables and leave their gradients in ``.grad``."""


class LaneOptimizer(ABC):
    """Improves variables ``(L, ...)`` in place."""

    @abstractmethod
    def step(self, evaluate: Evaluate, progress: float) -> None:
        """Take one step; ``progress`` in [0, 1] is the share of the budget that is spent."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors and numbers."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""


Schedule = Callable[[float], float]


def step_schedule(progress: float) -> float:
    """IG's schedule: a tenth after 3/8, 5/8 and 7/8 of the budget."""
    return float(0.1 ** sum(progress >= mark for mark in (3 / 8, 5 / 8, 7 / 8)))


def constant_schedule(progress: float) -> float:
    """No decay."""
    del progress
    return 1.0


def cosine_schedule(progress: float) -> float:
    """Half a cosine from 1 to 0.01."""
    return 0.01 + 0.99 * 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * progress))))


SCHEDULES: dict[str, Schedule] = {
    "step": step_schedule,
    "constant": constant_schedule,
    "cosine": cosine_schedule,
}


@dataclass(frozen=True, kw_only=True)
class FirstOrderSettings:
    """Adam or RMSprop, their learning rate and schedule.

    Attributes
    ----------
    signed
        Use the sign of the gradient (IG).
    rates
        What multiplies ``lr``, by variable; 1 where a name is left out.
    """

    kind: Literal["adam", "rmsprop"]
    lr: float
    schedule: str = "constant"
    momentum: float = 0.0
    signed: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)


class FirstOrder(LaneOptimizer):
    """A coordinate-wise optimizer of PyTorch on stacked variables."""

    def __init__(
        self,
        variables: Tensors,
        settings: FirstOrderSettings,
        project: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._project = project
        self._values = list(variables.values())
        by_rate: dict[float, list[Tensor]] = {}
        for name, value in variables.items():
            by_rate.setdefault(settings.rates.get(name, 1.0), []).append(value)
        self._rates = list(by_rate)
        groups = [{"params": v, "lr": settings.lr * rate} for rate, v in by_rate.items()]
        self._optimizer: torch.optim.Optimizer
        if settings.kind == "adam":
            self._optimizer = torch.optim.Adam(groups)
        else:
            self._optimizer = torch.optim.RMSprop(groups, momentum=settings.momentum)

    def step(self, evaluate: Evaluate, progress: float) -> None:
        """Evaluate once, then move."""
        factor = SCHEDULES[self._settings.schedule](progress)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = self._settings.lr * rate * factor
        self._optimizer.zero_grad(set_to_none=True)
        evaluate()
        for value in self._values:
            if value.grad is None:
                continue
            value.grad.nan_to_num_(0.0, 0.0, 0.0)
            if self._settings.signed:
                value.grad.sign_()
        self._optimizer.step()
        if self._project is not None:
            self._project()

    def state(self) -> dict[str, Any]:
        """The optimizer's own state dictionary."""
        return self._optimizer.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Load a state dictionary."""
        self._optimizer.load_state_dict(state)
