"""See who draws at random in a training: a loader that begins, a transform, or the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from bract.client.watching import DEPTH, Handler

_LOADING = "torch.utils.data.dataloader"
_DATA = "torch.utils.data"
_TRANSFORMS = "torchvision.transforms"
_MOST = 64

_RANDOM = (
    torch.Tensor.random_,
    torch.Tensor.uniform_,
    torch.Tensor.bernoulli_,
    torch.Tensor.normal_,
    torch.rand,
    torch.rand_like,
    torch.randn,
    torch.randn_like,
    torch.randint,
    torch.randperm,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
)


class Draws:
    """Everything that was drawn at random by PyTorch's own functions.

    Parameters
    ----------
    begins
        Takes a loader over which a pass begins.
    drew
        Takes what was drawn by neither data nor transforms.

    Attributes
    ----------
    transforms
        Classes of torchvision's transforms that drew, in their order.
    """

    def __init__(
        self, begins: Callable[[DataLoader[Any]], None], drew: Callable[[object], None]
    ) -> None:
        self._begins, self._drew = begins, drew
        self.transforms: dict[str, None] = {}

    def handlers(self) -> dict[Callable[..., Any], Handler]:
        """Return what watches the functions that draw."""
        return dict.fromkeys(_RANDOM, (None, self._draws))

    def _draws(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del args, kwargs
        frame = inspect.currentframe()
        for _ in range(DEPTH):
            frame = None if frame is None else frame.f_back
            if frame is None:
                break
            module = str(frame.f_globals.get("__name__", ""))
            if module == _LOADING and function is torch.Tensor.random_:
                loader = frame.f_locals.get("loader")
                if isinstance(loader, DataLoader):
                    self._begins(loader)
                    return
            if module.startswith(_TRANSFORMS) and len(self.transforms) < _MOST:
                own = frame.f_locals.get("self")
                if isinstance(own, nn.Module):
                    self.transforms[type(own).__name__] = None
                    return
            if module.startswith((_TRANSFORMS, _DATA)):
                return
        self._drew(result)
