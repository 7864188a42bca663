"""Made-up signals: heart beats as sums of waves, and daily load curves; no person's data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.config.signal import SignalSchema
from bract.data.sources import DATASETS, Dataset, Source, Split
from bract.data.spec import DataSpec
from bract.errors import BractError
from bract.seeds import derive_seed

COUNT = 1000
"""Signals of a made-up set; every fifth is test data."""

BEAT_RATE = 125.0
"""Values a second of a made-up beat."""

BEAT_KINDS = ("normal", "supraventricular", "ventricular", "fusion", "unknown")
"""Classes of the made-up beats, named as in the AAMI's grouping of arrhythmias."""

_WAVES = {
    "normal": ((40, 8, 0.15), (72, 2.5, -0.12), (77, 3.0, 1.0), (82, 3.0, -0.25), (115, 12, 0.30)),
    "supraventricular": (
        (58, 6, 0.10),
        (72, 2.5, -0.10),
        (77, 3.0, 0.9),
        (82, 3.0, -0.22),
        (112, 11, 0.25),
    ),
    "ventricular": ((70, 6, -0.15), (80, 9.0, 1.2), (96, 8.0, -0.55), (130, 14, -0.35)),
    "fusion": ((42, 8, 0.08), (73, 4.0, -0.10), (79, 6.0, 1.1), (90, 5.0, -0.40), (122, 13, 0.05)),
    "unknown": ((30, 14, 0.05), (75, 5.0, 0.45), (84, 5.0, -0.50), (104, 16, 0.12)),
}
"""Centre and width in values, and height in mV, of the P, Q, R, S and T waves of each kind."""

_BEATS = SignalSchema(
    channels=1,
    length=187,
    low=(-1.0,),
    high=(2.0,),
    mean=(0.05,),
    std=(0.25,),
    unit="mV",
    rate=BEAT_RATE,
)
_LOADS = SignalSchema(
    channels=1,
    length=24,
    low=(0.0,),
    high=(4.0,),
    mean=(1.4,),
    std=(0.8,),
    unit="kW",
    rate=1.0 / 3600.0,
    task="forecast",
)


@dataclass(frozen=True)
class SignalDataset(Dataset):
    """A made-up set of signals with its own schema.

    ``draw`` returns the values ``(channels, length)`` of one signal, in its unit, and its label.
    """

    own: SignalSchema = _BEATS
    draw: Callable[[int], tuple[Tensor, Tensor]] | None = None

    def schema(self, config: DataConfig) -> SignalSchema:
        """Return the set's schema; a declared one must be of the same signals.

        Raises
        ------
        BractError
            If the configuration names another input, or signals of another shape or task.
        """
        if config.input != "signal":
            raise BractError(
                f"data.name {config.name!r} holds signals, data.input is {config.input!r}; set "
                "data.input: signal",
                code="input-mismatch",
            )
        declared = config.signal or self.own
        if (declared.shape, declared.task, declared.horizon) != (
            self.own.shape,
            self.own.task,
            self.own.horizon,
        ):
            raise BractError(
                f"data.name {config.name!r} holds signals of {self.own.channels} channels of "
                f"{self.own.length} values for {self.own.task}, data.signal declares "
                f"{declared.channels} of {declared.length} for {declared.task}; take it out",
                code="config-conflict",
            )
        return declared

    def known_spec(self, config: DataConfig) -> DataSpec:
        """Return `spec`: made-up sets read no file."""
        return self.spec(config)

    def spec(self, config: DataConfig) -> DataSpec:
        """Return the shape ``(channels, 1, length)``, and the schema's statistics."""
        schema = self.schema(config)
        mean, std = schema.feature_moments()
        classes = schema.outputs or self.classes or 1
        return DataSpec(schema.shape, classes, mean, std, signal=schema)


@dataclass(frozen=True)
class Signals(Source):
    """Signals ``(channels, 1, length)`` in [0, 1]."""

    values: Tensor | None = None

    def images(self, indices: Sequence[int], *, channels: int, size: int) -> Tensor:
        """Return signals ``(n, channels, 1, length)``."""
        del channels, size
        assert self.values is not None
        return self.values[torch.as_tensor(list(indices), dtype=torch.int64)]


def beat(index: int) -> tuple[Tensor, Tensor]:
    """Return a made-up heart beat in mV, float32 ``(1, 187)``, and its class.

    A sum of Gaussian waves whose places, widths and heights vary by a seed of the number, with a
    slow drift and a little noise.
    """
    kind = index % len(BEAT_KINDS)
    generator = torch.Generator().manual_seed(derive_seed(index, "beat"))
    time = torch.arange(_BEATS.length, dtype=torch.float64)
    values = torch.zeros_like(time)
    shift = 6.0 * float(torch.randn((), generator=generator))
    for centre, width, height in _WAVES[BEAT_KINDS[kind]]:
        place, wide, high = torch.randn(3, generator=generator, dtype=torch.float64).tolist()
        middle = centre + shift + 1.5 * place
        spread = width * math.exp(0.1 * wide)
        values += height * math.exp(0.12 * high) * torch.exp(-(((time - middle) / spread) ** 2))
    drift, phase = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    values += 0.06 * drift * torch.sin(2 * math.pi * (time / _BEATS.length + phase))
    values += 0.01 * torch.randn(len(time), generator=generator, dtype=torch.float64)
    return values.float()[None], torch.tensor(kind)


def load(index: int) -> tuple[Tensor, Tensor]:
    """Return a made-up day of a household's load in kW, float32 ``(1, 24)``, and the next hour's.

    The next hour is standardised as the inputs are.
    """
    generator = torch.Generator().manual_seed(derive_seed(index, "load"))
    size, early, late, phase = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    hours = torch.arange(_LOADS.length + 1, dtype=torch.float64) + int(24 * phase)
    values = 0.4 + 0.5 * size + torch.zeros_like(hours)
    for hour, height, width in (
        (7 + 2 * early, 0.6 + early, 1.5),
        (18 + 3 * late, 1.0 + late, 2.5),
    ):
        apart = (hours - hour + 12) % 24 - 12
        values += height * torch.exp(-((apart / width) ** 2))
    values += 0.08 * torch.randn(len(hours), generator=generator, dtype=torch.float64)
    values = values.clamp(0.0, 4.0)
    target = (values[-1] - _LOADS.mean[0]) / _LOADS.std[0]
    return values[None, :-1].float(), target.float()


def _register(
    name: str,
    schema: SignalSchema,
    classes: int,
    draw: Callable[[int], tuple[Tensor, Tensor]],
) -> None:
    dataset: SignalDataset

    def open_split(config: DataConfig, split: Split) -> Source:
        given = dataset.schema(config)
        kept = [i for i in range(COUNT) if (i % 5 == i // 5 % 5) == (split == "test")]
        drawn = [draw(i) for i in kept]
        low, high = (torch.tensor(ends)[:, None] for ends in (given.lows, given.highs))
        values = torch.stack([(v - low) / (high - low) for v, _ in drawn]).clamp(0.0, 1.0)
        values = values[:, :, None, :].contiguous()
        return Signals(
            labels=torch.stack([label for _, label in drawn]),
            classes=classes,
            channels=given.channels,
            read=lambda i: values[i],
            values=values,
        )

    dataset = SignalDataset(open_split, schema.channels, classes, (), (), own=schema, draw=draw)
    DATASETS.register(name)(dataset)


_register("made-up-beats", _BEATS, len(BEAT_KINDS), beat)
_register("made-up-loads", _LOADS, 1, load)
