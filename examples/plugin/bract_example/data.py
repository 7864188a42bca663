"""A data set: stripes of four directions, drawn on request."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.data import Dataset, Source

_SIDE = 16
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


def _open(config: DataConfig, split: str) -> Source:
    del config
    count = 80 if split == "train" else 20
    labels = torch.arange(count) % len(_DIRECTIONS)

    def read(index: int) -> Tensor:
        rows, columns = torch.meshgrid(torch.arange(_SIDE), torch.arange(_SIDE), indexing="ij")
        down, right = _DIRECTIONS[int(labels[index])]
        phase = 0.5 * index + (0.25 if split == "test" else 0.0)
        waves = torch.sin(0.8 * (down * rows + right * columns) + phase)
        return (0.5 + 0.5 * waves)[None].to(torch.float32)

    return Source(labels=labels, classes=len(_DIRECTIONS), channels=1, read=read)


STRIPES = Dataset(open=_open, channels=1, classes=4, mean=(0.5,), std=(0.35,))
