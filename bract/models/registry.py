"""The model registry: one constructor signature for every model of the zoo."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from bract.errors import BractError, one_line, shown
from bract.references import TrustedReference, import_reference, is_reference
from bract.registry import Registry


class ModelFactory(Protocol):
    """Build a classifier for square images."""

    def __call__(
        self, *, classes: int, channels: int, image_size: int, activation: str
    ) -> nn.Module:
        """Return a model from images ``(B, channels, side, side)`` to logits ``(B, classes)``."""


MODELS: Registry[ModelFactory] = Registry(
    "model",
    group="bract.models",
    check=lambda _, entry: None if callable(entry) else f"{entry!r} is no function",
)

_ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}


def activation_layer(name: str) -> nn.Module:
    """Return a new ``sigmoid`` or ``relu`` layer."""
    if name not in _ACTIVATIONS:
        raise BractError(
            f"unknown activation {name!r}; expected one of {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]()


def create_model(
    name: str, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build a registered model, or one of the code that this process' user vouches for.

    Parameters
    ----------
    name
        A registered name, or a `TrustedReference` to a callable without arguments.
    classes, channels, image_size
        Number of classes, input channels, and the side of the square input in pixels.
    activation
        ``sigmoid`` (twice differentiable everywhere, as the papers attack it) or ``relu``.

    Returns
    -------
    nn.Module
        Maps ``(B, channels, image_size, image_size)`` float32 to logits ``(B, classes)``.
    """
    if isinstance(name, TrustedReference):
        return _call_factory(name)
    if is_reference(name):
        raise BractError(
            f"model {shown(name)} is code for which nothing on this machine vouches; not imported"
        )
    return MODELS[name](
        classes=classes, channels=channels, image_size=image_size, activation=activation
    )


def _call_factory(reference: TrustedReference) -> nn.Module:
    factory = import_reference(reference, what="model")
    try:
        model = factory()
    except Exception as error:
        raise BractError(
            f"model {reference!r} cannot be made ({type(error).__name__}: {one_line(error, 200)}); "
            "name a callable that needs no arguments, such as a function of your own that makes "
            "the model as the clients train it"
        ) from error
    if not isinstance(model, nn.Module):
        raise BractError(
            f"model {reference!r} made a {type(model).__name__}, expected a torch.nn.Module"
        )
    return model
