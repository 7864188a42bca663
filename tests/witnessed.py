"""A small training under a witness, and what was written of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file
from torch import nn

from bract.schema import Work, read_work

IMAGES = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 3

Trained = Callable[[Any], None]


def context(**node_config: Any) -> Context:
    """Return the context of one client."""
    return Context(1, 7, dict(node_config), RecordDict(), {})


def network() -> nn.Sequential:
    """Return a small network that normalises by batch; the same at every call."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def sgd(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """Return SGD at a rate of 0.1."""
    return torch.optim.SGD(net.parameters(), **({"lr": 0.1} | settings))


def seen(folder: Path) -> Work:
    """Return the one record that a witness wrote below a folder."""
    (path,) = folder.rglob("*.work.json")
    assert path.stat().st_mode & 0o777 == 0o600
    return read_work(path)


def kept(folder: Path) -> dict[str, int]:
    """Return labels by the bytes of what was kept."""
    found = [load_file(path) for path in folder.rglob("*.safetensors")]
    if not found:
        return {}
    (one,) = found
    pairs = zip(one["inputs"], one["labels"], strict=True)
    return {str(image.numpy().tobytes()): int(label) for image, label in pairs}


def places(*chosen: int) -> dict[str, int]:
    """Return what `kept` returns where these of `IMAGES` were kept."""
    return {str(IMAGES[p].numpy().tobytes()): int(LABELS[p]) for p in chosen}
