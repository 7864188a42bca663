"""Autoencoders as models whose one output is the reconstruction error, their own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from bract.errors import BractError, apart, one_line

Rebuild = Callable[[nn.Module, Tensor], Any]


class Autoencoder(nn.Module):
    """Map images ``(B, C, H, W)`` to the mean squared error of their reconstructions, ``(B, 1)``.

    The parameters are those of ``model``, by the same names and in the same memory. What rebuilds
    an image is the model itself, or where it returns something else (an embedding, in Flower's
    example for Lightning) its child ``decoder`` after its child ``encoder``; of images, or of
    images flattened to rows.

    Parameters
    ----------
    model
        As the clients train it.
    shape
        ``(C, H, W)`` of one image.

    Raises
    ------
    BractError
        If none of these returns as many values as an image has.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__()
        # Shared, so that replacing a parameter here replaces it for the model too.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._model = (model,)  # a tuple: as a child it would lengthen every name
        self.training = model.training
        self._flat, self._rebuild = _way(model, shape)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model as well."""
        super().train(mode)
        self._model[0].training = mode
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean squared error of each image, ``(B, 1)``."""
        inputs = images.flatten(1) if self._flat else images
        rebuilt: Tensor = self._rebuild(self._model[0], inputs)
        error = (rebuilt.flatten(1) - images.flatten(1)).square()
        return error.mean(dim=1, keepdim=True)


def _whole(model: nn.Module, inputs: Tensor) -> Any:
    return model.forward(inputs)


def _parts(model: nn.Module, inputs: Tensor) -> Any:
    children = dict(model.named_children())
    return children["decoder"](children["encoder"](inputs))


def _way(model: nn.Module, shape: tuple[int, int, int]) -> tuple[bool, Rebuild]:
    """Return how a model rebuilds images: whether it takes rows, and by what."""
    children = dict(model.named_children())
    ways: list[Rebuild] = [_whole, *([_parts] if {"encoder", "decoder"} <= set(children) else [])]
    kept = {name: value.clone() for name, value in model.named_buffers()}
    training = [module for module in model.modules() if module.training]
    model.eval()
    probe = torch.full((2, *shape), 0.5)
    found = []
    try:
        with torch.no_grad():
            for rebuild in ways:
                for flat in (False, True):
                    inputs = probe.flatten(1) if flat else probe
                    try:
                        with apart():
                            rebuilt = rebuild(model, inputs)
                    except Exception as error:  # noqa: BLE001 - a third-party model may raise anything
                        found.append(f"{type(error).__name__}: {one_line(error, 100)}")
                        continue
                    if isinstance(rebuilt, Tensor) and len(rebuilt) == 2:
                        if rebuilt.numel() == probe.numel():
                            return flat, rebuild
                        found.append(f"it returns {tuple(rebuilt.shape)} for two images")
                    else:
                        found.append(f"it returns a {type(rebuilt).__name__}")
            raise BractError(
                f"the model rebuilds no image of {'×'.join(map(str, shape))} ({found[-1]}); name a "
                "callable that makes one whose forward returns the reconstruction",
                code="model-unsuited",
            )
    finally:
        for module in training:
            module.training = True
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(kept[name])
