"""Changes of structure that a defense asks of the model, alike at the server and the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from bract.models.keylock import insert_key_locks
from bract.models.precode import insert_bottleneck
from bract.registry import Registry

ModelChange = Callable[[nn.Module, Mapping[str, Any]], nn.Module]

MODEL_CHANGES: Registry[ModelChange] = Registry("model change")


def prepare_model(model: nn.Module, defenses: Iterable[Mapping[str, Any]]) -> nn.Module:
    """Apply what the declared defenses change in the model, in their order, in place.

    Parameters
    ----------
    defenses
        Name and hyper-parameters of each defense, as the protocol declares them. Those that
        change no model are passed over.

    Returns
    -------
    nn.Module
        The model that server, clients and attackers share; it holds no client's secrets.
    """
    for defense in defenses:
        if defense["name"] in MODEL_CHANGES:
            model = MODEL_CHANGES[defense["name"]](model, defense)
    return model


@MODEL_CHANGES.register("fedkl")
def _fedkl(model: nn.Module, parameters: Mapping[str, Any]) -> nn.Module:
    return insert_key_locks(model, blocks=parameters.get("blocks", "first"))


@MODEL_CHANGES.register("precode")
def _precode(model: nn.Module, parameters: Mapping[str, Any]) -> nn.Module:
    return insert_bottleneck(
        model, latent=parameters.get("latent", 256), weight=parameters.get("weight", 1e-3)
    )
