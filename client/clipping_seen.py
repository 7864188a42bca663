"""See how a training clips its gradients, by what PyTorch's own clipping calls."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bract.client.watching import Handler, caller
from bract.schema.work import ClipSeen

MOST_MEASURED = 256
"""Steps of which it is seen whether clipping shortened a gradient."""

_CLIPPING = "torch.nn.utils.clip_grad"

_CLAMPS = [
    *(
        found
        for name in ("_foreach_clamp_min_", "_foreach_clamp_max_")
        if (found := getattr(torch, name, None)) is not None
    ),
    torch.Tensor.clamp_,
]


class Clips:
    """Every way of clipping that one training used."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float, float], _Clip] = {}
        self._measured: tuple[_Clip, Tensor] | None = None
        self._steps = 0

    def handlers(self) -> dict[Any, Handler]:
        """Return what watches the functions by which gradients are clipped."""
        return {
            torch.linalg.vector_norm: (None, self._norm),
            **dict.fromkeys(_CLAMPS, (self._clamp, None)),
        }

    @property
    def called(self) -> bool:
        """Return whether gradients were clipped in any way since the last step."""
        return any(clip.called for clip in self._known.values())

    @property
    def clamps(self) -> bool:
        """Return whether gradients were clipped by value since the last step."""
        return any(clip.kind == "value" and clip.called for clip in self._known.values())

    def stepped(self) -> None:
        """Count a step of an optimizer, which may have clipped within it."""
        self._steps += 1
        measured, self._measured = self._measured, None
        if measured is not None and self._steps <= MOST_MEASURED:
            clip, norm = measured
            clip.shortened(min(1.0, clip.bound / (float(norm) + 1e-6)))
        for clip in self._known.values():
            clip.stepped()

    def forget(self) -> None:
        """Forget calls since the last step, whose gradients were dropped."""
        self._measured = None
        for clip in self._known.values():
            clip.called = clip.shortens = False

    def records(self) -> tuple[ClipSeen, ...]:
        """Return one record for each way of clipping."""
        return tuple(clip.record() for clip in self._known.values())

    def _norm(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, args, kwargs
        frame = caller(_CLIPPING, "max_norm")
        if frame is None or not isinstance(result, Tensor) or result.numel() != 1:
            return
        bound, kind = float(frame.f_locals["max_norm"]), frame.f_locals.get("norm_type", 2.0)
        if bound == float("inf"):
            return
        # The last one of a call is the whole norm.
        self._measured = self._called("norm", bound, float(kind), frame), result.detach()

    def _clamp(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, kwargs, result
        frame = caller(_CLIPPING, "clip_value")
        if frame is None:
            return
        bound = float(frame.f_locals["clip_value"])
        clip = self._called("value", bound, float("inf"), frame)
        held = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        if clip.shortens or self._steps >= MOST_MEASURED:
            return
        if any(bool((value.detach().abs() > bound).any()) for value in held):
            clip.shortens = True

    def _called(self, kind: str, bound: float, norm_type: float, frame: FrameType) -> _Clip:
        key = (kind, bound, norm_type)
        if key not in self._known and len(self._known) < 16:
            self._known[key] = _Clip(kind, bound, norm_type)
        clip = self._known.get(key) or _Clip(kind, bound, norm_type)
        clip.called = True
        grads = frame.f_locals.get("grads")
        clip.tensors = len(grads) if isinstance(grads, list) else 0
        return clip


class _Clip:
    """One way of clipping, and what it did so far."""

    def __init__(self, kind: str, bound: float, norm_type: float) -> None:
        self.kind, self.bound, self.norm_type = kind, bound, norm_type
        self.called = self.shortens = False
        self.tensors = self._steps = self._reached = 0
        self._least: float | None = None

    def shortened(self, factor: float) -> None:
        """Note by which factor a step's gradients were multiplied."""
        if factor < 1.0:
            self.shortens = True
            self._least = factor if self._least is None else min(self._least, factor)

    def stepped(self) -> None:
        """Count a step of an optimizer before which it was called."""
        self._steps += self.called
        self._reached += self.called and self.shortens
        self.called = self.shortens = False

    def record(self) -> ClipSeen:
        """Return what is written of it."""
        return ClipSeen(
            kind="norm" if self.kind == "norm" else "value",
            bound=self.bound,
            norm_type=self.norm_type if self.norm_type != float("inf") else 0.0,
            steps=self._steps,
            reached=self._reached,
            least=self._least,
            tensors=self.tensors,
        )
