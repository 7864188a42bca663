"""Buffers of an app's own layers, by the names that their classes give them.

Which arrays of a reply are running statistics shows here, and not in the reply's names: of an app
that returns what it received under the same names those are the server's.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook


@dataclass
class LayerBuffers:
    """Buffers of some names in the layers that an app has made.

    Attributes
    ----------
    endings
        Names that a layer's class gives its buffers, such as ``running_mean``.
    layers
        Those that are known.
    made
        Values of their buffers after the app has answered.
    """

    endings: frozenset[str]
    layers: list[nn.Module] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def look(self) -> None:
        """Note the layers that there are."""
        self.layers += _alive()

    def hold(self, value: Tensor, *, rounded: bool = False) -> bool:
        """Return whether a layer holds an array, to the bit, or up to the rounding of a sum."""
        alike = _close if rounded else _same
        if any(alike(value, held) for held in self.made):
            return True
        # A model that was made before, as one of a module's own.
        return any(alike(value, held) for held in _buffers(_alive(), self.endings))


@contextmanager
def layer_buffers(endings: Collection[str]) -> Iterator[LayerBuffers]:
    """Note the layers with buffers of these names that are made meanwhile.

    A model may be gone when the app has answered; its buffers are kept, its parameters are not.
    """
    found = LayerBuffers(frozenset(endings))

    def note(layer: nn.Module, name: str, buffer: Tensor | None) -> None:
        del buffer
        if name in found.endings:
            found.layers.append(layer)

    handle = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()
        layers = {id(layer): layer for layer in found.layers}.values()
        found.made = list(_buffers(layers, found.endings))
        found.layers.clear()


def _alive() -> list[nn.Module]:
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]


def _buffers(layers: Iterable[nn.Module], endings: Collection[str]) -> Iterator[Tensor]:
    for layer in layers:
        for name, buffer in layer.__dict__.get("_buffers", {}).items():
            if name in endings and isinstance(buffer, Tensor) and not buffer.is_meta:
                yield buffer


def _same(value: Tensor, held: Tensor) -> bool:
    alike = (value.shape, value.dtype) == (held.shape, held.dtype)
    return alike and torch.equal(value, held.detach().to(value.device))


def _close(value: Tensor, held: Tensor) -> bool:
    alike = (value.shape, value.dtype) == (held.shape, held.dtype)
    return alike and torch.allclose(value, held.detach().to(value.device), rtol=1e-5, atol=1e-6)
