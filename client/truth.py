"""What the client trained on, kept on its own disk to score an audit. It never leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_truth(
    folder: Path,
    server_round: int,
    images: Tensor,
    labels: Tensor,
    *,
    report: Mapping[str, float] | None = None,
) -> Path:
    """Write the images and labels of one round's update, mode 0600.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, in order of first use.
    report
        What the defenses measured about the bare update: figures that the server must not have.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    final = folder / f"round-{server_round:04d}.safetensors"
    temporary = folder / f".{final.name}.tmp"
    save_file(
        {"images": images.contiguous(), "labels": labels.contiguous()},
        temporary,
        metadata={"report": json.dumps(dict(report or {}))},
    )
    temporary.chmod(0o600)
    return temporary.replace(final)
