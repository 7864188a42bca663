"""What the client trained on, kept on its own disk to score an audit. It never leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_truth(folder: Path, server_round: int, images: Tensor, labels: Tensor) -> Path:
    """Write the images and labels of one round's update, mode 0600.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, in order of first use.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    final = folder / f"round-{server_round:04d}.safetensors"
    temporary = folder / f".{final.name}.tmp"
    save_file({"images": images.contiguous(), "labels": labels.contiguous()}, temporary)
    temporary.chmod(0o600)
    return temporary.replace(final)


def save_report(folder: Path, server_round: int, report: Mapping[str, float]) -> Path:
    """Write what the defenses measured on one round's private update, mode 0600."""
    final = folder / f"round-{server_round:04d}.defense.json"
    temporary = folder / f".{final.name}.tmp"
    temporary.write_text(json.dumps(dict(report), indent=1))
    temporary.chmod(0o600)
    return temporary.replace(final)
