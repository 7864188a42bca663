"""Guess the schema of signals from what consenting clients kept of them and from the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bract.config.signal import Layout, SignalSchema
from bract.errors import BractError
from bract.inputs.base import what_is_audited

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


def first_layer(model: nn.Module) -> nn.Module | None:
    """Return the first module with parameters of its own."""
    return next((m for m in model.modules() if list(m.parameters(recurse=False))), None)


def takes_signals(model: nn.Module) -> bool:
    """Return whether a model begins with a layer over time."""
    return isinstance(first_layer(model), (nn.Conv1d, *_RECURRENT))


def guess_signals(
    inputs: Sequence[Tensor], targets: Sequence[Tensor], model: nn.Module
) -> SignalSchema:
    """Return a schema by which a model sees the kept signals as they are.

    Which axis is time follows from the model's first layer: a convolution over time has its
    channels first, a recurrent layer its features last. Where it shows neither, the longer axis is
    time. The range of a channel is that of the kept signals.

    Parameters
    ----------
    inputs
        Model inputs ``(N, ...)`` of two or three dimensions, finite floats, one tensor a client and
        round.
    targets
        int64 ``(N,)``, classes, or floats ``(N,)`` or ``(N, horizon)``, the next values.

    Raises
    ------
    BractError
        If the signals differ in shape, or are not finite.
    """
    shapes = {tuple(part.shape[1:]) for part in inputs}
    if len(shapes) != 1:
        raise BractError(
            f"clients kept signals of the shapes {', '.join(map(str, sorted(shapes)))}; expected "
            "the same everywhere",
            code="truth-unusable",
        )
    kept = torch.cat([part.double() for part in inputs])
    goals = torch.cat([part.double() for part in targets])
    if not bool(kept.isfinite().all() and goals.isfinite().all()):
        raise BractError(
            "clients kept signals that hold values that are not finite", code="truth-unusable"
        )
    layout = _layout(kept, model)
    ordered = kept[:, None] if layout == "flat" else kept
    if layout == "time-first":
        ordered = ordered.transpose(1, 2)
    each = ordered.transpose(0, 1).flatten(1)
    ranges = [_range(channel) for channel in each]
    forecast = targets[0].is_floating_point()
    return SignalSchema(
        channels=ordered.shape[1],
        length=ordered.shape[2],
        low=tuple(low for low, _ in ranges),
        high=tuple(high for _, high in ranges),
        layout=layout,
        task="forecast" if forecast else "classification",
        horizon=goals.shape[1] if forecast and goals.dim() == 2 else 1,
    )


def refuse_open_signals(model: nn.Module) -> None:
    """Refuse a model over time of whose input nothing shows the length and the range."""
    first = first_layer(model)
    over_time = "a convolution over time" if isinstance(first, nn.Conv1d) else "a recurrent layer"
    channels = getattr(first, "in_channels", getattr(first, "input_size", 1))
    layout = "channels-first" if isinstance(first, nn.Conv1d) else "time-first"
    raise BractError(
        f"bract.yaml: input.signal is not given; the model begins with {over_time}, whose length "
        f"no capture shows; give --set input.signal.channels={channels} with "
        "input.signal.length=VALUES, input.signal.low=[LOW] and input.signal.high=[HIGH] of the "
        f"values that the model sees, and input.signal.layout={layout}, or name what clients kept: "
        f"--truth FOLDER; {what_is_audited()}",
        code="declaration-lacks",
    )


def _layout(kept: Tensor, model: nn.Module) -> Layout:
    if kept.dim() == 2:
        return "flat"
    first = first_layer(model)
    if isinstance(first, nn.Conv1d):
        return "channels-first" if kept.shape[1] == first.in_channels else "time-first"
    if isinstance(first, _RECURRENT):
        return "time-first" if kept.shape[2] == first.input_size else "channels-first"
    return "channels-first" if kept.shape[1] <= kept.shape[2] else "time-first"


def _range(values: Tensor) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if low < high else (low - 1.0, high + 1.0)
