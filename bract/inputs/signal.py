"""Signals: values over time ``(channels, 1, length)`` in [0, 1], by a schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.config.signal import MOST_CHANNELS, MOST_LENGTH, SignalSchema
from bract.errors import BractError, shown
from bract.inputs.base import INPUTS, References, Truth
from bract.inputs.by_schema import ROUNDING, InputBySchema, KeptBySchema, ReferenceBySchema, moments
from bract.inputs.targets import classes_of
from bract.schema import ClientDeclaration
from bract.schema.inputs import SignalOutline

_DIGITS = 7
"""Significant digits of a saved value: those of float32."""


@INPUTS.register("signal")
@dataclass(frozen=True)
class Signal(SignalOutline, InputBySchema[SignalSchema]):
    """Signals, with classes or the next values as targets."""

    suffix = ".signal"
    keys = "channels, length, low, high, unit"

    def examples(self, batch: object) -> tuple[Tensor, Tensor] | None:
        """Return float signals and targets of a batch, the signals as the model takes them.

        Signals are ``(B, channels, length)`` or ``(B, length, channels)``, or ``(B, length)`` of a
        forecast of several values (with one value they are kept as rows of a table, and are the
        same tensors). Targets are classes ``(B,)``, also one-hot, or float values ``(B,)``,
        ``(B, 1)`` or ``(B, horizon)``.
        """
        if not isinstance(batch, Mapping | tuple | list):
            return None
        parts = dict(batch if isinstance(batch, Mapping) else enumerate(batch))
        tensors = {k: v.detach().cpu() for k, v in parts.items() if isinstance(v, Tensor)}
        found = _signals_of(tensors)
        if found is None:
            return None
        name, signals = found
        others = {
            k: t for k, t in tensors.items() if k != name and t.shape[:1] == signals.shape[:1]
        }
        target = _targets_of(others)
        if target is None or (signals.dim() == 2 and target.dim() == 1):
            return None
        return signals.float().contiguous(), target

    def read(self, kept: Mapping[str, Tensor], declaration: ClientDeclaration) -> Truth:
        """Return the signals that a client kept, whose file may come from another party."""
        schema = self.of_schema()
        if "inputs" in kept:
            signals = _examples(kept["inputs"], schema, declaration)
        else:
            signals = kept["images"]
        if signals.dtype != torch.float32 or signals.dim() != 4 or not len(signals):
            raise BractError(
                f"signals are {signals.dtype} {tuple(signals.shape)}, expected (N, channels, 1, "
                "length)",
                code="data-shape",
            )
        if tuple(signals.shape[1:]) != schema.shape:
            raise BractError(
                f"signals have {signals.shape[1]} channels of {signals.shape[3]} values, the "
                f"declared schema {schema.channels} of {schema.length}",
                code="data-shape",
            )
        if not bool(((signals >= 0.0) & (signals <= 1.0)).all()):
            raise BractError("signals have values outside of [0, 1]", code="data-value")
        return Truth(signals, _checked_targets(kept["labels"], schema, len(signals)))

    def references(self, data: DataConfig, seed: int) -> References:
        """Return signals of the test split."""
        return SignalReference(data, seed)

    @staticmethod
    def references_of(
        examples: Tensor, labels: Tensor, seed: int, schema: SignalSchema
    ) -> References:
        """Return signals that clients kept."""
        return KeptSignals(examples, labels, seed, schema)

    @staticmethod
    def extent(schema: SignalSchema) -> str:
        """Return in words how many channels and values a signal has."""
        return f"the schema of signals has {schema.channels} channels of {schema.length} values"

    def save(self, example: Tensor, beside: Path, index: int, role: str) -> str:
        """Write the values of a signal in its unit, with range, unit and rate, as JSON."""
        schema = self.of_schema()
        values = in_unit(example, schema)
        content = {
            "unit": schema.unit,
            "rate": schema.rate,
            "low": min(schema.lows),
            "high": max(schema.highs),
            "values": [[_short(v) for v in channel] for channel in values.tolist()],
        }
        return self._write(json.dumps(content) + "\n", beside, index, role)

    @classmethod
    def check_saved(cls, name: str, content: bytes) -> None:
        """Refuse what is no JSON of a signal's values."""
        try:
            found = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BractError(
                f"{name} is no JSON of a signal: {shown(str(error))}", code="file-damaged"
            ) from error
        values = found.get("values") if isinstance(found, dict) else None
        if not _are_channels(values):
            raise BractError(
                f"{name} is no JSON of a signal: expected the values of each channel, as many "
                "numbers in each",
                code="file-damaged",
            )


class SignalReference(ReferenceBySchema[SignalSchema]):
    """Signals of the test split; of a forecast all are of one class."""

    kind = Signal.name
    random_name = "random_signal"

    @property
    def one_class(self) -> bool:
        """Return whether the target is the next values."""
        return self.schema.task == "forecast"


class KeptSignals(SignalReference, KeptBySchema[SignalSchema]):
    """Signals that clients kept, without those of one client's update."""


def in_unit(examples: Tensor, schema: SignalSchema) -> Tensor:
    """Return the values ``(..., channels, length)`` of examples in the schema's unit, float64."""
    low, high = (
        torch.tensor(ends, dtype=torch.float64)[:, None] for ends in (schema.lows, schema.highs)
    )
    return examples.squeeze(-2).double().cpu() * (high - low) + low


def _signals_of(tensors: Mapping[object, Tensor]) -> tuple[object, Tensor] | None:
    """Return the first signals among a batch's tensors, with their key."""
    floats = {k: t for k, t in tensors.items() if t.is_floating_point() and len(t)}
    whole = next(((k, t) for k, t in floats.items() if t.dim() == 3), None)
    return whole or next(((k, t) for k, t in floats.items() if t.dim() == 2), None)


def _targets_of(tensors: Mapping[object, Tensor]) -> Tensor | None:
    """Return classes, int64 ``(B,)``, or values, float32 ``(B,)`` or ``(B, horizon)``."""
    classes = classes_of(tensors)
    if classes is not None:
        return classes
    values = [t for t in tensors.values() if t.is_floating_point()]
    if not values:
        return None
    flat = values[0].flatten(1) if values[0].dim() > 1 else values[0][:, None]
    if flat.shape[1] < math.prod(values[0].shape[1:]) or values[0].dim() > 3:
        return None
    return (flat[:, 0] if flat.shape[1] == 1 else flat).float().contiguous()


def _examples(inputs: Tensor, schema: SignalSchema, declaration: ClientDeclaration) -> Tensor:
    """Return examples in [0, 1] of model inputs as the schema lays them out."""
    wanted = {
        "channels-first": (schema.channels, schema.length),
        "time-first": (schema.length, schema.channels),
        "flat": (schema.length,),
    }[schema.layout]
    if inputs.dtype != torch.float32 or tuple(inputs.shape[1:]) != wanted:
        raise BractError(
            f"inputs are {inputs.dtype} {tuple(inputs.shape)}, expected (N, "
            f"{', '.join(map(str, wanted))}) by the schema's layout {schema.layout}; correct "
            "input.signal",
            code="data-shape",
        )
    ordered = inputs.transpose(1, 2) if schema.layout == "time-first" else inputs
    mean, std = moments(declaration, schema)
    values = ordered.reshape(-1, schema.channels, schema.length) * std[:, None] + mean[:, None]
    low, high = float(values.min()), float(values.max())
    if not -ROUNDING <= low <= high <= 1.0 + ROUNDING:
        outside = ((values < -ROUNDING) | (values > 1.0 + ROUNDING)).nonzero()
        channel = int(outside[0][1]) if len(outside) else 0
        raise BractError(
            f"the client's signals are outside the declared range of channel {channel + 1}; "
            "correct low and high of input.signal, or its mean and std",
            code="data-value",
        )
    return values.clamp(0.0, 1.0)[:, :, None, :].contiguous()


def _checked_targets(labels: Tensor, schema: SignalSchema, count: int) -> Tensor:
    """Check targets, and return classes as int64 or values as float32."""
    if schema.task == "classification":
        if labels.shape != (count,) or labels.is_floating_point() or bool((labels < 0).any()):
            raise BractError(
                f"targets are {labels.dtype} {tuple(labels.shape)}, expected {count} classes, "
                "int64",
                code="data-shape",
            )
        return labels.long()
    wanted = (count,) if schema.horizon == 1 else (count, schema.horizon)
    if tuple(labels.shape) != wanted or not labels.is_floating_point():
        raise BractError(
            f"targets are {labels.dtype} {tuple(labels.shape)}, expected floats {wanted} of a "
            f"forecast of {schema.horizon} values",
            code="data-shape",
        )
    if not bool(labels.isfinite().all()):
        raise BractError("targets hold values that are not finite", code="data-value")
    return labels.float()


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _are_channels(values: object) -> bool:
    """Return whether an object is a list of channels with as many finite numbers each."""
    if not isinstance(values, list) or not 0 < len(values) <= MOST_CHANNELS:
        return False
    if not all(isinstance(one, list) and 0 < len(one) <= MOST_LENGTH for one in values):
        return False
    numbers = [v for one in values for v in one]
    alike = all(len(one) == len(values[0]) for one in values)
    return alike and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in numbers
    )
