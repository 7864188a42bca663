"""Defenses that change a model or read its batch, for a model that bract did not build.

One line where the app makes its model, at the server and at the clients alike::

    net = keylock(net)

and ``ClientApp(mods=[DefenseMod("fedkl")])``. While the mod handles a message, the line also gives
the model this client's secrets; elsewhere it changes the structure alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from bract.defenses.base import Defense
from bract.defenses.entries import read_defense
from bract.models.keylock import private_parameters
from bract.models.own_loss import own_losses

M = TypeVar("M", bound=nn.Module)


class ModelHook(Protocol):
    """What a client's mod does with the model that its app trains."""

    def __call__(self, model: nn.Module, defense: Defense) -> None:
        """Give the model this client's secrets, and remember it."""


MODEL_HOOK: ContextVar[ModelHook | None] = ContextVar("bract.defenses.own_model", default=None)
"""Of the message that is being handled; None at a server."""


def keylock(net: M, **parameters: Any) -> M:
    """Lock the first batch normalisation of ``net`` with this client's key (FedKL), in place.

    Parameters
    ----------
    net
        Any model with a `torch.nn.BatchNorm2d`. Call it before `load_state_dict`, at the server and
        at the clients alike, and `net.parameters()` for the optimizer after it.
    parameters
        Hyper-parameters of `bract.defenses.FedKL`; the mod's must be the same.
    """
    return defended(net, "fedkl", **parameters)


def defended(net: M, name: str, **parameters: Any) -> M:
    """Prepare ``net`` for a defense that changes the model or reads its batch, in place.

    ``fedkl`` locks it, ``precode`` puts a bottleneck before its last layer, whose loss joins that
    of the app, and ``soteria`` watches its first batch. A model that has been prepared stays so.

    Parameters
    ----------
    net
        The model; see `keylock`.
    name, parameters
        The defense and its hyper-parameters; the mod's must be the same.
    """
    defense = read_defense({"name": name, **parameters})
    defense.prepare_model(net)
    hook = MODEL_HOOK.get()
    if hook is not None:
        hook(net, defense)
        for layer in own_losses(net):
            layer.adds_loss = True
        # Optimizers of the app train what is private as well; names and states never list it.
        net.parameters = MethodType(_all_parameters, net)  # type: ignore[method-assign]
    return net


def _all_parameters(model: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    yield from nn.Module.parameters(model, recurse)
    yield from private_parameters(model)


def first_batch(model: nn.Module) -> list[torch.Tensor]:
    """Return a list that will hold the first batch of images that ``model`` is trained on."""
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not seen and module.training and arguments and isinstance(arguments[0], torch.Tensor):
            seen.append(arguments[0].detach().clone())

    model.register_forward_pre_hook(look)
    return seen
