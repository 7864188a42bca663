"""Differentiate, and look at operations, without PyTorch's compiler.

`torch.func.grad` and a dispatch mode import `torch._dynamo` when they are first used: time before
the first result, and memory, of every process that attacks, none of which compiles anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from bract.updates.update import Tensors


def gradient_at(
    function: Callable[[Tensors], Tensor], at: Tensors, beside: Iterable[Tensor]
) -> Tensors:
    """Return the gradient of a function with one value; zeros for what it does not depend on.

    The same numbers as those of `torch.func.grad`, which is taken inside of a transform of
    `torch.func`. It can be differentiated itself, with respect to what ``at`` and ``beside``
    depend on; a backward pass then names its ``inputs``, or else it also fills tensors made here.

    Parameters
    ----------
    beside
        What else the function depends on and the gradient may be differentiated by.

    Raises
    ------
    RuntimeError
        If the function changed one of these in place: it then has another value at every call.
    """
    if peek_interpreter_stack() is not None or torch.is_inference_mode_enabled():
        found: Tensors = grad(function)(at)
        return found
    given = [*at.values(), *beside]
    versions = [value._version for value in given]
    varying = any(value.requires_grad for value in given)
    further = varying and torch.is_grad_enabled()
    with torch.enable_grad():
        # A view of its own: the function may depend on the same tensor elsewhere.
        points = {
            name: value.view_as(value)
            if further and value.requires_grad
            else value.detach().requires_grad_()
            for name, value in at.items()
        }
        made = function(points)
        if [value._version for value in given] != versions:
            raise RuntimeError("the model changes what it is given in place, such as a buffer")
        if not made.requires_grad:
            return {name: torch.zeros_like(value) for name, value in at.items()}
        slopes = torch.autograd.grad(
            made, list(points.values()), create_graph=further, allow_unused=True
        )
    return {
        name: torch.zeros_like(value) if slope is None else slope
        for (name, value), slope in zip(at.items(), slopes, strict=True)
    }


class Watch(TorchDispatchMode):
    """Base of what looks at operations; a subclass defines ``__torch_dispatch__``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
