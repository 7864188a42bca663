"""Record what optimizers do to a model's parameters, by the hooks around their steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bract.schema.work import MOST_NAMES, MOST_STEPS, ChangeSeen, GroupSeen, OptimizerSeen

_IMPLEMENTATION = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
)
"""Keys of a group that say how a step is computed, and not what it does."""

MOST_OPTIMIZERS = 64


def scaled_by(optimizer: Optimizer) -> tuple[bool, float]:
    """Return whether a step changed nothing for infinite gradients, and their scale in it.

    `torch.amp.GradScaler` hands both to an optimizer that unscales within its step, as fused ones.
    """
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if not isinstance(found, Tensor):
        return False, 1.0
    return bool(found.any()), float(scale) if isinstance(scale, Tensor) else 1.0


class Steps:
    """Steps of every optimizer that holds a parameter of one model.

    Parameters
    ----------
    model
        Its parameters have names in what is recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._seen: dict[int, _Watched | None] = {}
        self.total = 0

    def before(self, optimizer: Optimizer) -> None:
        """Note what a step is about to do."""
        watched = self._of(optimizer)
        if watched is not None:
            watched.before()

    def after(self, optimizer: Optimizer) -> bool:
        """Count a step that was made; return whether it is one of the model's."""
        watched = self._of(optimizer)
        if watched is None:
            return False
        watched.after()
        self.total += 1
        return True

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds a parameter of the model."""
        return self._of(optimizer) is not None

    def records(self) -> tuple[OptimizerSeen, ...]:
        """Return one record for each optimizer, in the order of their first steps."""
        return tuple(one.record() for one in self._seen.values() if one is not None and one.steps)

    def moved(self) -> tuple[str, ...]:
        """Return the names of parameters that a step moved, in the model's order."""
        held = {n for one in self._seen.values() if one is not None for n in one.moved}
        return tuple(name for name in self._names.values() if name in held)[:MOST_NAMES]

    def _of(self, optimizer: Optimizer) -> _Watched | None:
        known = self._seen.get(id(optimizer))
        if known is not None or id(optimizer) in self._seen:
            return known
        mine = any(id(p) in self._names for g in optimizer.param_groups for p in g["params"])
        if not mine or len(self._seen) >= MOST_OPTIMIZERS:
            return None
        self._seen[id(optimizer)] = _Watched(optimizer, self._names)
        return self._seen[id(optimizer)]


class _Watched:
    """One optimizer, which is held so that no other one gets its identity."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer, self._names = optimizer, names
        self.steps = 0
        self.moved: set[str] = set()
        self._resumed = bool(optimizer.state)
        self._first: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []
        self._groups: list[tuple[str, ...]] = []
        self._changes: list[ChangeSeen] = []
        self._left_out = 0
        self._waiting = [p for g in optimizer.param_groups for p in g["params"]]

    def before(self) -> None:
        now = [_settings(group) for group in self.optimizer.param_groups]
        if not self._first:
            self._first = now
        elif now != self._last:
            for number, (group, earlier) in enumerate(zip(now, self._last, strict=False)):
                changed = {k: v for k, v in group.items() if earlier.get(k) != v}
                if not changed:
                    continue
                if len(self._changes) < MOST_STEPS:
                    self._changes.append(
                        ChangeSeen(step=self.steps, group=number, settings=changed)
                    )
                else:
                    self._left_out += 1
        self._last = now

    def after(self) -> None:
        """Count a step, and note what had a gradient; a closure makes it within the step."""
        self._waiting = [p for p in self._waiting if not self._note(p)]
        if not self.steps:
            self._groups = [
                tuple(self._name(p) for p in g["params"] if p.grad is not None)
                for g in self.optimizer.param_groups
            ]
        self.steps += 1

    def record(self) -> OptimizerSeen:
        kind = type(self.optimizer)
        return OptimizerSeen(
            name=_line(kind.__qualname__),
            module=_line(kind.__module__),
            steps=self.steps,
            resumed=self._resumed,
            groups=tuple(
                GroupSeen(names=names[:MOST_NAMES], settings=settings)
                for names, settings in zip(self._groups, self._first, strict=True)
            ),
            changes=tuple(self._changes),
            left_out=self._left_out,
        )

    def _note(self, parameter: nn.Parameter) -> bool:
        """Note a parameter that has a gradient; return whether it has one."""
        if parameter.grad is None:
            return False
        self.moved.add(self._name(parameter))
        return True

    def _name(self, parameter: nn.Parameter) -> str:
        return self._names.get(id(parameter), "(another model's)")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: _setting(v) for k, v in group.items() if k not in _IMPLEMENTATION}
    return {k[:64]: v for k, v in list(found.items())[:64] if k}


def _setting(value: object) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, tuple | list) and len(value) <= 16:
        numbers = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in value]
        if all(isinstance(v, int | float) and math.isfinite(v) for v in numbers):
            return tuple(float(v) for v in numbers)
    return str(value)[:64] if isinstance(value, str) else type(value).__name__[:64]


def _line(text: str) -> str:
    return text[:300] or "unnamed"
