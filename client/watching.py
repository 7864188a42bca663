"""Watch what a training calls, by PyTorch's mode of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any
from weakref import WeakMethod

import torch
from torch.overrides import TorchFunctionMode

DEPTH = 12
"""Callers among which clipping, a DataLoader or a transform is looked for."""

RANDOM = (
    torch.Tensor.random_,
    torch.Tensor.uniform_,
    torch.Tensor.bernoulli_,
    torch.Tensor.normal_,
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
)
"""Functions that draw at random."""


Call = Callable[[Any, Any, Any, Any], None]
"""Takes a function, its arguments, its keywords, and its result or None."""


Handler = tuple[Call | None, Call | None]
"""What is called before a function, and after it."""


class Watching(TorchFunctionMode):
    """Calls what watches a function, before or after it; everything else passes."""

    def __init__(self, handlers: Mapping[Callable[..., Any], Handler]) -> None:
        super().__init__()
        self._handlers = handlers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        before, after = handler
        given = kwargs or {}
        if before is not None:
            before(func, args, given, None)
        result = func(*args, **given)
        if after is not None:
            after(func, args, given, result)
        return result


def caller(module: str, name: str) -> FrameType | None:
    """Return the nearest caller of a module that has a local variable of this name."""
    frame = inspect.currentframe()
    for _ in range(DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == module and name in frame.f_locals:
            return frame
    return None


class ModuleHook:
    """Calls a method of what watches a module, and does nothing in a copy of the module.

    Neither the copy nor a file of it holds what watches, or needs bract to be read.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self.method = WeakMethod(method)

    def __call__(self, *given: Any) -> None:
        """Pass on what a hook gets."""
        if torch.compiler.is_compiling():
            return
        method = self.method()
        if method is not None:
            method(*given)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a function of the standard library that takes anything and returns None."""
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        """Pickle that function in its place."""
        return getattr, (nullcontext(), "__exit__")
