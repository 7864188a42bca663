"""Find and replace layers of any model by name."""

from __future__ import annotations

from torch import nn

from bract.errors import BractError


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name and the last linear layer in the order of registration: the output layer."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not found:
        raise BractError(
            f"{type(model).__name__} has no linear output layer; choose a classifier that ends in "
            "torch.nn.Linear",
            code="model-unsuited",
        )
    return found[-1]


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put ``layer`` in the place of the sub-module called ``name``."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
