"""Pictures of tensors on disk."""

from __future__ import annotations

import io
from pathlib import Path

from torch import Tensor

from bract.files import write_bytes


def save_picture(image: Tensor, beside: Path, index: int, role: str) -> str:
    """Write one image as a PNG of its own resolution, mode 0600; return the file's name.

    Parameters
    ----------
    image
        float32 ``(C, H, W)`` in [0, 1], C 1 or 3.
    beside
        The JSON file that the picture belongs to; its stem begins the picture's name.

    Raises
    ------
    WriteFailedError
        If it cannot be written; nothing of it is left.
    """
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    path = beside.with_name(f"{beside.stem}--{index:02d}-{role}.png")
    content = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(content, "PNG")
    return write_bytes(path, content.getvalue()).name
