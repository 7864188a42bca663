"""Vectors of spectral norms (Miyato et al., ICLR 2018) that were not sent.

A client's power iteration moves them, at each forward pass in training, to the first singular
vectors of the weight, wherever they began. So they are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm as _Older

from bract.errors import BractError
from bract.updates.update import Tensors


@dataclass(frozen=True)
class SpectralNorm:
    """One spectral norm of a model.

    Attributes
    ----------
    path, owner
        The module that holds the vectors, and by its mode moves them, with its name in the model.
    left, right
        The vectors' names there, of outputs and of inputs.
    weight
        Name of the parameter in the model.
    matrix
        Returns the weight as a matrix ``(outputs, inputs)``.
    is_first
        Whether it takes the weight itself, and not what an earlier parametrization makes of it.
    """

    path: str
    owner: nn.Module
    left: str
    right: str
    weight: str
    matrix: Callable[[Tensor], Tensor]
    is_first: bool = True

    @property
    def vectors(self) -> tuple[str, str]:
        """The vectors' names in the model."""
        return _joined(self.path, self.left), _joined(self.path, self.right)


def spectral_norms(model: nn.Module) -> Iterator[SpectralNorm]:
    """Yield every spectral norm that holds vectors, of both of PyTorch's implementations."""
    for path, module in model.named_modules():
        if isinstance(module, nn.utils.parametrizations._SpectralNorm):
            if "_u" in module._buffers:
                weight = _joined(path.rpartition(".")[0], "original")
                matrix = module._reshape_weight_to_matrix
                first = path.rpartition(".")[2] == "0"
                yield SpectralNorm(path, module, "_u", "_v", weight, matrix, first)
            continue
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Older):
                left, right = f"{hook.name}_u", f"{hook.name}_v"
                weight = _joined(path, f"{hook.name}_orig")
                matrix = hook.reshape_weight_to_matrix
                yield SpectralNorm(path, module, left, right, weight, matrix)


def unsent_norms(model: nn.Module, buffers: Mapping[str, Tensor]) -> list[SpectralNorm]:
    """Return the spectral norms whose vectors are not among these buffers."""
    return [one for one in spectral_norms(model) if not set(one.vectors) <= buffers.keys()]


def take_converged(model: nn.Module, parameters: Tensors, buffers: Mapping[str, Tensor]) -> None:
    """Set vectors that were not sent to the weight's first singular vectors, in place.

    They are no part of the state then, and stay as they are while the model is called.

    Raises
    ------
    BractError
        If another parametrization changes the weight before the norm does.
    """
    for norm in unsent_norms(model, buffers):
        if not norm.is_first:
            raise BractError(
                f"the vectors of the spectral norm of {norm.weight} were not sent, and cannot be "
                "taken from a weight that another parametrization changes first",
                code="model-unsuited",
            )
        weight = parameters.get(norm.weight)
        if weight is None:
            continue
        found = torch.linalg.svd(norm.matrix(weight.detach().double().cpu()), full_matrices=False)
        for name, value in ((norm.left, found.U[:, 0]), (norm.right, found.Vh[0])):
            held = norm.owner._buffers[name]
            assert held is not None
            norm.owner._buffers[name] = value.to(held)
            norm.owner._non_persistent_buffers_set.add(name)


def hold_still(model: nn.Module) -> None:
    """Let vectors that are no part of the state be as they are, in training mode too."""
    for norm in spectral_norms(model):
        if norm.left in norm.owner._non_persistent_buffers_set:
            norm.owner.eval()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
