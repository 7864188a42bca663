"""Optimizers over many trials at once: no step in one trial depends on another.

`torch.optim` is not used because it cannot move a sum of weights that are not kept: with the whole
first layer in its place an iteration of GRNN on 8 trials takes 1.28 times as long
(``python -m experiments.optimizers``; one of IG takes the same to 1 %, to the last bit).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bract.updates.update import Tensors

Evaluate = Callable[[], Tensor]
"""Compute the loss ``(L,)`` at the current variables and leave their gradients in ``.grad``."""


_BETA1, _BETA2, _ALPHA, _EPS = 0.9, 0.999, 0.99, 1e-8
"""PyTorch's defaults for Adam and RMSprop, which the papers use."""

_PIECE = 1 << 15
"""Values at a time: with gradient, moments and a temporary, 640 KiB in float32."""


class BatchedOptimizer(ABC):
    """Improves variables ``(L, ...)`` in place.

    Attributes
    ----------
    components
        How a record of what ran names it.
    derivative_free
        Whether losses are all it asks for.
    """

    components: ClassVar[tuple[str, ...]] = ()
    derivative_free: ClassVar[bool] = False

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
"""The factor of the learning rate by the share of the budget that is spent, by name."""


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


class FirstOrder(BatchedOptimizer):
    """Adam or RMSprop on stacked variables, to the last bit as `torch.optim` has them.

    On a CPU each variable is walked through in pieces that stay in the cache while all the
    arithmetic of a step is done on them: a generator's step is bound by memory, not arithmetic.

    Parameters
    ----------
    variables
        Leaves ``(L, ...)``, changed in place.
    project
        Called after each step, to put variables back where they must be.
    sums
        Latents ``(L, n)`` by the name of a variable ``(L, ...)`` that is a sum ``y = sum_i z_i
        w_i`` of n parameters that are not kept: each has the gradient z_i dy, so each moves by a
        multiple of one common step and their sum by ``|z|_1`` times it. eps enters as its mean over
        the parameters, which is exact to first order in eps over the root mean square of the
        gradient.
    """

    def __init__(
        self,
        variables: Tensors,
        settings: FirstOrderSettings,
        project: Callable[[], None] | None = None,
        sums: Tensors | None = None,
    ) -> None:
        self._settings = settings
        self._project = project
        self._values = list(variables.values())
        self._rates = [settings.rates.get(name, 1.0) for name in variables]
        self._square = [torch.zeros_like(v, requires_grad=False) for v in self._values]
        self._moment = [torch.zeros_like(v, requires_grad=False) for v in self._values]
        self._gain = [
            _Gain.of(sums[n], v) if sums and n in sums else None for n, v in variables.items()
        ]
        self._steps = 0

    def step(self, evaluate: Evaluate, progress: float) -> None:
        """Evaluate once, then move."""
        for value in self._values:
            value.grad = None
        evaluate()
        self._steps += 1
        lr = self._settings.lr * SCHEDULES[self._settings.schedule](progress)
        move = self._adam if self._settings.kind == "adam" else self._rmsprop
        with torch.no_grad():
            for value, rate, square, moment, gain in zip(
                self._values, self._rates, self._square, self._moment, self._gain, strict=True
            ):
                if value.grad is None:
                    continue
                whole = gain is not None
                for x, g, v, m in _pieces(value, value.grad, square, moment, whole=whole):
                    g.nan_to_num_(0.0, 0.0, 0.0)
                    if self._settings.signed:
                        g.sign_()
                    move(x, g, v, m, lr * rate, gain)
        if self._project is not None:
            self._project()

    def _adam(
        self,
        value: Tensor,
        gradient: Tensor,
        square: Tensor,
        moment: Tensor,
        lr: float,
        gain: _Gain | None,
    ) -> None:
        moment.lerp_(gradient, 1 - _BETA1)
        square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        root = square.sqrt().div_((1 - _BETA2**self._steps) ** 0.5)
        value.addcdiv_(moment, _divisor(root, gain), value=-lr / (1 - _BETA1**self._steps))

    def _rmsprop(
        self,
        value: Tensor,
        gradient: Tensor,
        square: Tensor,
        moment: Tensor,
        lr: float,
        gain: _Gain | None,
    ) -> None:
        square.mul_(_ALPHA).addcmul_(gradient, gradient, value=1 - _ALPHA)
        divisor = _divisor(square.sqrt(), gain)
        moment.mul_(self._settings.momentum).addcdiv_(gradient, divisor)
        value.add_(moment, alpha=-lr)

    def state(self) -> dict[str, Any]:
        """Number of steps and the moments of each variable."""
        return {"steps": self._steps, "squares": self._square, "moments": self._moment}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._steps = int(state["steps"])
        self._square, self._moment = list(state["squares"]), list(state["moments"])


@dataclass(frozen=True)
class _Gain:
    """Movement of a sum of parameters: the factor ``(L, 1, ...)`` of its step, and its eps."""

    factor: Tensor
    eps: Tensor

    @classmethod
    def of(cls, latent: Tensor, like: Tensor) -> _Gain:
        total = latent.abs().sum(dim=1).clamp_min(1e-30).view(-1, *[1] * (like.dim() - 1))
        return cls(total, _EPS * latent.shape[1] / total)


def _divisor(root: Tensor, gain: _Gain | None) -> Tensor:
    if gain is None:
        return root.add_(_EPS)
    return root.add_(gain.eps).div_(gain.factor)


def _pieces(
    value: Tensor, gradient: Tensor, square: Tensor, moment: Tensor, *, whole: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    tensors = (value, gradient, square, moment)
    if whole or value.device.type != "cpu" or not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(t.view(-1), _PIECE) for t in tensors), strict=True)
