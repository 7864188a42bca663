"""The model registry: one constructor signature for every model of the zoo."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import TextSchema
from bract.errors import BractError, apart, one_line, shown
from bract.installed.references import TrustedReference, import_reference, is_reference
from bract.models.autoencoder import Autoencoder
from bract.models.losses import RECONSTRUCTION
from bract.models.third_party_texts import of_texts
from bract.registry import Registry, unknown


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

_WITH_SETTINGS = re.compile(r"([\w-]+)\((.*)\)")
_COMMON = ("classes", "channels", "image_size", "activation", "table", "text", "signal")

_ACTIVATIONS: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}


def activation_layer(name: str) -> nn.Module:
    """Return a new ``sigmoid`` or ``relu`` layer."""
    if name not in _ACTIVATIONS:
        raise BractError(
            f"unknown activation {name!r}; expected one of {', '.join(sorted(_ACTIVATIONS))}",
            code="unknown-name",
        )
    return _ACTIVATIONS[name]()


def create_model(
    name: str,
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    table: TableSchema | None = None,
    text: TextSchema | None = None,
    signal: SignalSchema | None = None,
    loss: str = "cross_entropy",
) -> nn.Module:
    """Build a registered model, or one of the code that this process' user vouches for.

    Parameters
    ----------
    name
        A registered name, with settings of its own in brackets where it has some (``vit(patch=8,
        width=96)``), or a `TrustedReference` to a callable without arguments.
    classes, channels, image_size
        Number of classes, input channels, and the side of the square input in pixels.
    activation
        ``sigmoid`` (twice differentiable everywhere, as the papers attack it) or ``relu``.
    table
        Schema of the rows, ``channels`` features each, which the model then takes as
        ``(B, channels, 1, 1)`` and sees as ``(B, channels)``; None for other inputs.
    text
        Schema of the texts, which the model takes as ``(B, length, 1, 1)`` and sees as token ids
        ``(B, length)``; None for other inputs.
    signal
        Schema of the signals, which the model takes as ``(B, channels, 1, length)`` and sees in the
        schema's layout; None for other inputs.
    loss
        What it is trained on; with ``reconstruction`` the model is an autoencoder, and returned as
        one that maps images to their reconstruction errors (`Autoencoder`).

    Returns
    -------
    nn.Module
        Maps ``(B, channels, image_size, image_size)`` float32 to logits ``(B, classes)``.
    """
    shape = (channels, image_size, image_size)
    schemas = {"table": table, "text": text, "signal": signal}
    if isinstance(name, TrustedReference):
        made = _reading(_call_factory(name), table, text, signal)
        made = of_texts(made, text) if text is not None else of_logits(made)
        return _trained_on(loss, made, shape)
    if is_reference(name):
        raise BractError(
            f"model {shown(name)} is code for which nothing on this machine vouches; not imported",
            code="code-untrusted",
        )
    factory, settings = _factory(name)
    taken = [kind for kind in schemas if kind in inspect.signature(factory).parameters]
    if text is not None and "text" not in taken:
        raise BractError(
            f"model {shown(name)} takes no token ids; set model.name to text-encoder or "
            "text-decoder, or data.input to what the model takes",
            code="input-mismatch",
        )
    if signal is not None and "signal" not in taken:
        raise BractError(
            f"model {shown(name)} takes no signals; set model.name to conv1d or lstm, or "
            "data.input to what the model takes",
            code="input-mismatch",
        )
    make: Any = factory
    made = make(
        classes=classes,
        channels=channels,
        image_size=image_size,
        activation=activation,
        **settings,
        **{kind: schemas[kind] for kind in taken},
    )
    return _trained_on(loss, _reading(made, table, text, signal), shape)


def _trained_on(loss: str, model: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    return Autoencoder(model, shape) if loss == RECONSTRUCTION else model


def _reading(
    model: nn.Module,
    table: TableSchema | None,
    text: TextSchema | None,
    signal: SignalSchema | None,
) -> nn.Module:
    if signal is not None:
        return of_signals(model, signal)
    if text is not None:
        return of_tokens(model, text)
    return model if table is None else of_rows(model)


def of_logits(model: nn.Module) -> nn.Module:
    """Return the logits alone of a model that returns an object with them; return the model.

    Models of transformers return logits with a loss and hidden states beside them.
    """

    def read(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Tensor | None:
        del inputs
        logits = None if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
        return logits if isinstance(logits, Tensor) else None

    model.register_forward_hook(read)
    return model


def of_rows(model: nn.Module) -> nn.Module:
    """Flatten what enters a model, so that it sees rows ``(B, features)``; return the model."""
    model.register_forward_pre_hook(_flattened)
    return model


def of_signals(model: nn.Module, signal: SignalSchema) -> nn.Module:
    """Lay out what enters a model, ``(B, channels, 1, length)``, as the schema says; return it."""

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (laid_out(inputs[0], signal), *inputs[1:])

    model.register_forward_pre_hook(read)
    return model


def laid_out(inputs: Tensor, signal: SignalSchema) -> Tensor:
    """Return signals ``(..., channels, 1, length)`` in the layout in which a model takes them."""
    found = inputs.squeeze(-2)
    if signal.layout == "time-first":
        return found.transpose(-1, -2)
    return found.squeeze(-2) if signal.layout == "flat" else found


def seen_by_model(inputs: Tensor, table: TableSchema | None, signal: SignalSchema | None) -> Tensor:
    """Return inputs ``(..., C, H, W)`` as the hooks of `create_model` hand them to the model.

    For a copy of the model without hooks, such as a traced one.
    """
    if signal is not None:
        return laid_out(inputs, signal)
    return inputs if table is None else inputs.flatten(-3)


def of_tokens(model: nn.Module, text: TextSchema) -> nn.Module:
    """Read what enters a model, ``(B, T, 1, 1)`` numbers, as token ids ``(B, T)``; return it."""

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids = inputs[0]
        if ids.is_floating_point():
            ids = ids.detach().flatten(1).round().clamp(0, text.vocabulary - 1).long()
        return (ids, *inputs[1:])

    model.register_forward_pre_hook(read)
    return model


def _flattened(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].flatten(1), *inputs[1:])


def _factory(name: str) -> tuple[ModelFactory, dict[str, Any]]:
    """Return a registered factory, and the settings that the name holds."""
    parts = _WITH_SETTINGS.fullmatch(name)
    if parts is None:
        return MODELS[name], {}
    factory = MODELS[parts[1]]
    known = _own_settings(factory)
    settings: dict[str, Any] = {}
    for entry in filter(None, (part.strip() for part in parts[2].split(","))):
        key, given, value = (part.strip() for part in entry.partition("="))
        if not given or key in settings:
            raise BractError(
                f"model {shown(name)}: expected settings as name=value, each once, found "
                f"{shown(entry)}",
                code="config-value",
            )
        if key not in known:
            raise BractError(
                unknown(f"setting of model {parts[1]!r}", key, known), code="config-key"
            )
        settings[key] = _read(name, key, value, known[key])
    return factory, settings


def _own_settings(factory: ModelFactory) -> Mapping[str, Any]:
    """Return the types of a factory's settings but those of every model, by name."""
    hints = get_type_hints(factory)
    return {key: hints[key] for key in inspect.signature(factory).parameters if key not in _COMMON}


def _read(name: str, key: str, value: str, kind: Any) -> int | str:
    """Return a setting's value: a whole number, or one of the words of its type."""
    words = get_args(kind) if get_origin(kind) is Literal else ()
    if words and value in words:
        return value
    if not words and re.fullmatch(r"\d{1,9}", value):
        return int(value)
    expected = f"one of {', '.join(words)}" if words else "a whole number"
    raise BractError(
        f"model {shown(name)}: {key} is {shown(value)}, expected {expected}", code="config-value"
    )


def _call_factory(reference: TrustedReference) -> nn.Module:
    factory = import_reference(reference, what="model")
    try:
        with apart():
            model = factory()
    except Exception as error:
        raise BractError(
            f"model {reference!r} cannot be made ({type(error).__name__}: {one_line(error, 200)}); "
            "name a callable that needs no arguments, such as a function of your own that makes "
            "the model as the clients train it",
            code="model-faulty",
        ) from error
    if type(model).__module__.startswith("sklearn."):
        raise BractError(
            f"model {reference!r} is scikit-learn's {type(model).__name__}: its captures are not "
            "attacked, since no gradient of it can be simulated; only models of PyTorch are",
            code="model-unsuited",
        )
    if not isinstance(model, nn.Module):
        raise BractError(
            f"model {reference!r} made a {type(model).__name__}, expected a torch.nn.Module",
            code="model-faulty",
        )
    # Several GPUs, or a compiler, around the model: the same function, of which attacks need the
    # inside.
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    inner = getattr(model, "_orig_mod", model)  # torch.compile's
    return _of_numbers(reference, inner if isinstance(inner, nn.Module) else model)


def _of_numbers(reference: TrustedReference, model: nn.Module) -> nn.Module:
    """Return a model whose parameters are of 32 bits where they were of 64.

    Values come from captures, and an attack computes in its own precision.
    """
    parameters = list(model.named_parameters())
    for name, value in parameters:
        if is_lazy(value):
            raise BractError(
                f"model {reference!r} has no {name} before its first pass, as lazy layers have "
                "none; name a callable that makes the model and calls it once on an input",
                code="model-unsuited",
            )
        if value.is_complex():
            raise BractError(
                f"model {reference!r} has complex parameters ({name}), which are not audited; "
                "hold them as real ones (torch.view_as_real)",
                code="model-unsuited",
            )
    return model.float() if any(v.dtype is torch.float64 for _, v in parameters) else model
