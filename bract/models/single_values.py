"""Batch normalisation of a single value, which PyTorch refuses to train with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def single_value_norm(model: nn.Module, image_shape: tuple[int, int, int]) -> str | None:
    """Return the first batch normalisation that one image leaves one value a channel, or None.

    Deep layers of a network that halves the image often are there at small images. In training
    such a layer has no variance to divide by.

    Parameters
    ----------
    model
        On the device ``meta``; it runs once, on shapes alone. None is returned of a model that
        cannot run there.
    image_shape
        ``(C, H, W)``.
    """
    found: list[str] = []

    def watch(name: str, norm: nn.modules.batchnorm._BatchNorm) -> None:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if math.prod(inputs[0].shape[2:]) == 1:
                found.append(name)

        hooks.append(norm.register_forward_pre_hook(note))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            watch(name, module)
    if not hooks:
        return None
    try:
        with torch.no_grad():
            model(torch.empty(2, *image_shape, device="meta"))
    except (NotImplementedError, RuntimeError):
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
