"""The convolutions of a model whose gradient may determine what enters them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bract.attacks.problem.case import Case
from bract.models import tap

_MOST_PRODUCTS = 2**28
"""Most multiplications of patches by the row space: places times their numbers times dimensions.
The search makes hundreds to thousands of passes of four times as many operations."""

_PROBES = 2
"""Random images that tell how the layers run."""

_SUMMED = 1e-3
"""Most that a random gradient's sum over the places may be of its norm, where a normalisation makes
it zero; rounding leaves 1e-6."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of the attacked model, as it runs on one image.

    Attributes
    ----------
    name
        Of the module; its weight has shape ``(O, C, k, l)``.
    entering
        Shape ``(C, H, W)`` of what enters.
    positions
        Number of places P at which the kernel is applied.
    kernel, stride, padding
        Down and across, in pixels.
    taken
        Dimensions of the row space that the normalisation directly behind it takes off, of all
        images of the upload together: in each step 1 by the batch, one an image by each image's
        own maps.
    """

    name: str
    entering: tuple[int, int, int]
    positions: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    taken: int = 0

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return f"{self.name}.weight" if self.name else "weight"

    def unfolded(self, maps: Tensor) -> Tensor:
        """Return patches ``(P, c, k * l)`` of maps ``(c, H, W)``, zero outside."""
        patches = F.unfold(maps[None], self.kernel, padding=self.padding, stride=self.stride)
        return patches[0].T.reshape(self.positions, len(maps), -1)

    def folded(self, patches: Tensor) -> Tensor:
        """Return the sum ``(c, H, W)`` of patches ``(P, c, k * l)`` in their places."""
        columns = patches.flatten(1).T[None]
        size = self.entering[1:]
        made: Tensor = F.fold(columns, size, self.kernel, padding=self.padding, stride=self.stride)
        return made[0]


@dataclass
class _Call:
    """What a hook saw of one call of a convolution.

    ``gradient`` is that of what left it, ``(2, O, P)``, once the backward pass went by.
    """

    entered: tuple[int, ...]
    left: tuple[int, ...]
    gradient: Tensor | None = None


def convolutions(case: Case, steps: int = 1) -> list[Convolution]:
    """Return the convolutions whose gradient may determine what enters, first ones first.

    There are no more places, of all images and steps together, than the layer has units, but for
    what a normalisation behind it takes (`Convolution.taken`), and patches overlap.

    Parameters
    ----------
    steps
        Local steps, each on all images.
    """
    model = case.target_model.model
    modules = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and _plain(m)}
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    found = []
    for name, calls in _calls(case, modules).items():
        module, call = modules[name], calls[0]
        if len(calls) > 1 or users[id(module.weight)] > 1:
            continue
        # Maps that were reordered for the kernel, as a video's frames, are no images of a batch.
        if len(call.entered) != 4 or call.entered[0] != _PROBES or not math.prod(call.entered):
            continue
        padding = module.padding
        assert not isinstance(padding, str)
        layer = Convolution(
            name,
            (call.entered[1], call.entered[2], call.entered[3]),
            call.left[2] * call.left[3],
            (module.kernel_size[0], module.kernel_size[1]),
            (module.stride[0], module.stride[1]),
            (int(padding[0]), int(padding[1])),
            steps * _taken(call, case.images),
        )
        overlap = any(k > s for k, s in zip(layer.kernel, layer.stride, strict=True))
        dims = layer.positions * case.images * steps
        inside = layer.positions * module.weight[0].numel() * dims <= _MOST_PRODUCTS
        enough = dims - layer.taken <= module.out_channels
        if layer.positions > 1 and enough and overlap and inside:
            found.append(layer)
    return found


def _calls(case: Case, modules: Mapping[str, nn.Conv2d]) -> dict[str, list[_Call]]:
    """Run random images forward and a random gradient back; return every call of modules."""
    shape = case.target_model.image_shape
    seen: dict[str, list[_Call]] = defaultdict(list)

    given: dict[str, tuple[int, ...]] = {}

    def enters(name: str, value: Tensor) -> None:
        given[name] = tuple(value.shape)

    def leaves(name: str, made: Tensor) -> None:
        call = _Call(given[name], tuple(made.shape))
        seen[name].append(call)

        def back(gradient: Tensor) -> None:
            call.gradient = gradient.flatten(2)

        if made.requires_grad:
            made.register_hook(back)

    model, state = case.target_model.model, case.target_model.captured(case.observation)
    # Layers that track their inputs write into their buffers.
    state = state | {name: state[name].clone() for name in case.target_model.buffer_names}
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(_PROBES, *shape, generator=generator).requires_grad_()
    with (
        tap.entering(model, modules, enters),
        tap.leaving(model, modules, leaves),
        torch.enable_grad(),
    ):
        logits = functional_call(model, state, (inputs,))
        weights = torch.randn(logits.shape, generator=generator)
        if logits.requires_grad:
            torch.autograd.grad((logits * weights).sum(), [inputs], allow_unused=True)
    return seen


def _taken(call: _Call, images: int) -> int:
    """Return how many dimensions a normalisation takes: gradients sum to zero over its places."""
    gradient = call.gradient
    if gradient is None or not gradient.any():
        return 0
    whole = gradient.norm()
    if gradient.sum(dim=2).norm() < _SUMMED * whole:
        return images
    return int(gradient.sum(dim=(0, 2)).norm() < _SUMMED * whole)


def _plain(module: nn.Conv2d) -> bool:
    once = module.groups == 1 and module.dilation == (1, 1)
    return once and module.padding_mode == "zeros" and not isinstance(module.padding, str)
