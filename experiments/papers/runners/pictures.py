"""Pictures of results: originals above reconstructions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import torch
from torch import Tensor

PICTURES = 4
"""Reconstructions of a row that are shown."""


def picture(shown: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Return a PNG in base64: originals above, reconstructions below."""
    from PIL import Image

    rows = [torch.cat([pair[k] for pair in shown], dim=2) for k in (0, 1)]
    whole = torch.cat(rows, dim=1).clamp(0.0, 1.0)
    pixels = (whole * 255).round().byte().permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    made = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    made.save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode("ascii")
