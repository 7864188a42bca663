"""Evaluations that a GPU replays from one recording, without a launch of each kernel."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from bract.attacks.solve.optimizers import Evaluate
from bract.errors import one_line

RECORD_AFTER = 20
"""Evaluations before the recording: a short descent is not worth one."""

_WARM = 2
"""Evaluations on the stream of the recording before it, by which libraries set themselves up."""

_TOLERANCE = 1e-4
"""Largest difference of a replay from an evaluation, of the largest value of each tensor.

Kernels of a GPU may add in another order at each run.
"""

_log = logging.getLogger(__name__)


class Recorded:
    """Evaluate a loss on a GPU, from a recording (a CUDA graph) once there is one.

    Attacks on small models are bound by the launches of thousands of small kernels; a recording is
    launched as a whole. Where an evaluation cannot be recorded, or its replay does not give the
    same losses and gradients, it goes on as before.

    Parameters
    ----------
    evaluate
        Compute ``(L,)`` losses on a CUDA device, leave gradients in ``.grad`` of the variables,
        and update tensors in place alone. It must depend on nothing that changes but the values
        of the variables and tensors, and may be called a few times more than asked for.
    variables
        Leaves that are changed in place between evaluations.
    after
        Evaluations before the recording.
    """

    def __init__(
        self, evaluate: Evaluate, variables: Sequence[Tensor], *, after: int = RECORD_AFTER
    ) -> None:
        self._evaluate = evaluate
        self._variables = list(variables)
        self._left = after
        self._graph: torch.cuda.CUDAGraph | None = None
        self._losses: Tensor | None = None
        self._gradients: list[Tensor | None] = []

    @property
    def recorded(self) -> bool:
        """Return whether evaluations are replayed."""
        return self._graph is not None

    def __call__(self) -> Tensor:
        """Return losses ``(L,)``; gradients are in ``.grad`` until the next call."""
        if self._graph is None or self._losses is None:
            losses = self._evaluate()
            self._left -= 1
            if self._left == 0:
                self._try_to_record(losses)
            return losses
        self._graph.replay()
        for variable, gradient in zip(self._variables, self._gradients, strict=True):
            variable.grad = gradient
        return self._losses.clone()

    def _try_to_record(self, losses: Tensor) -> None:
        expected = [None if v.grad is None else v.grad.clone() for v in self._variables]
        try:
            made, gradients = self._record()
            same = _near(made, losses) and all(
                _near(mine, other) for mine, other in zip(gradients, expected, strict=True)
            )
            self._losses, self._gradients = made, gradients
            why = "" if same else "its replay gives other losses or gradients"
        except RuntimeError as error:
            why = one_line(str(error), 200)
        if why:
            _log.info("an evaluation is not recorded: %s", why)
            self._graph, self._losses, self._gradients = None, None, []
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        for variable, gradient in zip(self._variables, expected, strict=True):
            variable.grad = gradient

    def _record(self) -> tuple[Tensor, list[Tensor | None]]:
        """Record and replay once; return the losses and gradients that each replay fills."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                self._evaluate()
        torch.cuda.current_stream().wait_stream(stream)
        for variable in self._variables:
            variable.grad = None
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            losses = self._evaluate()
        self._graph = graph
        graph.replay()
        return losses, [variable.grad for variable in self._variables]


def _near(mine: Tensor | None, other: Tensor | None) -> bool:
    if mine is None or other is None:
        return mine is other
    mine, other = (value.nan_to_num(0.0, 0.0, 0.0) for value in (mine, other))
    apart = (mine - other).abs().max()
    return bool(apart <= _TOLERANCE * other.abs().max().clamp_min(1e-30))
